"""Fragments that run in one process, though the program runs on many ranks."""
