"""Shared by renderers: totals, identical ranks, folded layers, selections, units. No output."""
