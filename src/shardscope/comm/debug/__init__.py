"""The drop-in for torch's CommDebugMode: its names, keys and tables over our counting."""
