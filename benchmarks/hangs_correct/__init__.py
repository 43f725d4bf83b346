"""Correct distributed programs, on which `shardscope check` has to stay silent."""
