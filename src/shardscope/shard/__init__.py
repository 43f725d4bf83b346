"""What each rank holds: audit of parameters, op coverage, memory of a step, timed phases."""
