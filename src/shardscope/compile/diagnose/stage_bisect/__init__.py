"""Finds the stage and the part of the compiler that cause a failure."""
