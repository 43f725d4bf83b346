"""How many graphs a function makes, and why."""
