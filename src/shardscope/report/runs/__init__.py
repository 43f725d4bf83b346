"""Compares the values that two recorded runs sampled, whatever their layouts.

`full_values.py` merges the samples of all ranks into figures of the full tensor, `noise_limits.py`
says how much of a deviation rounding explains, `compare_runs.py` finds the first tensor beyond
that, `run_causes.py` says what the samples tell about it, and `comparison_text.py` prints it.
"""
