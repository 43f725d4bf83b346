"""Renders recordings as text for the terminal.

Each file renders one section: `summary.py` shows all sections that a recording has data for,
`views.py` those that the user asks for. `elements.py` has the tables, titles and
source lines that sections are made of.
"""
