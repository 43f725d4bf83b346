"""WHAT EACH RANK HOLDS: sharded module tree, parameter audit, phases, op coverage, memory."""
