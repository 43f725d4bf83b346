"""Graphs with their inputs, and extraction of any subset of their ops as a new graph."""
