"""What a browser is given: one record per view, each worked out here so that a page only draws.

Numbers that point into a list of the page (modules, sources, names) are positions; -1 is none.
"""
