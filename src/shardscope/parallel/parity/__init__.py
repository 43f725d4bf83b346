"""Checks whether the parallel version of a model computes what the single device does."""
