"""The version of this package, written once."""

__all__ = ["__version__"]

__version__ = "0.1.0"
