"""Compares two recordings and renders the changes.

`compare_recordings.compare` returns `changes.Changes`: a row for everything that was added, removed
or changed. Each `*_changes.py` lists the facts of one area, `facts.py` matches those of the two
recordings by module name and folds identical layers. `changes_text.py` and `changes_markdown.py`
render the rows.
"""
