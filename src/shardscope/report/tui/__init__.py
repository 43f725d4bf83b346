"""Browses a recording in the terminal: modules, collectives, findings, and the views."""
