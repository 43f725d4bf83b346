"""What changed from one recording to another: one list of changes, whoever shows it."""
