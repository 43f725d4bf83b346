"""Compares a compiled graph or function with eager execution."""
