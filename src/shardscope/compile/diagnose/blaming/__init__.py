"""Which stage and which part of the compiler a failure is due to."""
