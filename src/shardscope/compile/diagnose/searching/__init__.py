"""The fewest ops that still fail."""
