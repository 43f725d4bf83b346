"""WHAT IT SAYS: collectives: tracing, attribution to modules, cross-rank matching."""
