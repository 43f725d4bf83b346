"""Where something came from: module names, call sites, the running module, the run and its rank.

Every instrument charges what it observes to a module, a phase and a line of the user's
program; this package finds them. It imports `_torch` and `world`, and none of the instruments.
"""
