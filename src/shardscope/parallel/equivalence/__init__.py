"""Runs of a model and the comparison of their results, which `verify` and `parity` share."""
