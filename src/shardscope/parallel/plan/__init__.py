"""Plans: styles and placements by name, parsed and resolved against a program and a mesh."""
