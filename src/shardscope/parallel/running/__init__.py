"""One rank's program as a module to call: little more than its ops."""
