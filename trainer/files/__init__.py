"""Files that are whole or absent, and logs of whole lines; knows no torch."""
