"""What the user asks for: styles and placements by name, checked against the program."""
