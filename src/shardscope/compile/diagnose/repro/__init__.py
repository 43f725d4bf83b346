"""What fails, written down as a script that needs nothing but torch."""
