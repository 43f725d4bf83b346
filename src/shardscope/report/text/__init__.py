"""Recordings as text for the terminal, one section per subject."""
