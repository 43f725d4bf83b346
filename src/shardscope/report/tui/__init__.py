"""Browses a recording in the terminal, as `shardscope tui` does.

`browser.py` is the application, `browse.py` its screens, `walk.py` and `module_index.py` the data
that they show: modules, collectives and findings.
"""
