"""One rank's program as a module to call."""
