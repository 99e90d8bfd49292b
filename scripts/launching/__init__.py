"""Several processes of one run: started, watched and answered for."""
