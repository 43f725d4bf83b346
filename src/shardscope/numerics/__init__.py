"""Numerical equality: distances, noise floors, double precision, perturbed rounding, verdicts."""
