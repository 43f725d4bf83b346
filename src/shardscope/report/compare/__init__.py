"""Compares two recordings and renders the changes."""
