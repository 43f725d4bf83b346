"""A recording to walk through in a terminal: modules, collectives, findings, and the views."""
