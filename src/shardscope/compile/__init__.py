"""WHAT THE COMPILER DOES: debugging backends, explanations, diagnosis, minimal repros."""
