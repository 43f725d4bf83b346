"""Faults in training runs, and what tools say of the files that they leave: see `hang_dumps.py`."""
