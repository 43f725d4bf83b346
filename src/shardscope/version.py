"""The version of this package, and the versions of torch that it was tested with, written once."""

__version__ = "0.1.0"

TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The releases of torch on which the whole test suite passes, from the oldest to the newest."""
