"""A command's result as one bounded JSON document, for coding agents and scripts.

`result.py` has the document and its limits on size, `figures.py` the figures that it may have,
`recording_figures.py` and `correctness_figures.py` read them from a recording.
"""
