"""Browses a recording in the terminal, as `shardscope tui` does.

`browser.py` is the application with its panes, `rows.py` their table, `browser_state.py` and
`module_index.py` the data that they show: modules, collectives and findings.
"""
