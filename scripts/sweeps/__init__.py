"""Many jobs from one command line, `train -m`: a grid, or a search by Optuna."""
