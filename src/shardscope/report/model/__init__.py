"""What all renderers compute from a recording before they render it.

Totals of collectives and sets of identical ranks, the module tree with repeated layers folded,
selected modules, and parameters with their bytes. Nothing here depends on an output format.
"""
