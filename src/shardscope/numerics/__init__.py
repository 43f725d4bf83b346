"""HOW FAR OFF A NUMBER MAY BE: distances, noise floors, double precision, verdicts."""
