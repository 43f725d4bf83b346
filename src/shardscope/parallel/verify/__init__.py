"""Runs the programs of all ranks in this process and compares them with the single device."""
