"""Writes a failure as a script that needs nothing but torch."""
