"""Faults on purpose: a compiler that goes wrong at an op, at a stage, in a way of your choice."""
