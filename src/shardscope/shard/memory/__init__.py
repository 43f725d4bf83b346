"""`memory(model, step)`: a rank's memory during a step, by kind, by module and over time."""
