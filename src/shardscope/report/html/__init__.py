"""Renders a recording as one HTML file that opens offline.

`page.py` and `page_views.py` define the data that the page reads; the TypeScript types in `web/`
are made from them. Each `*_rows.py` computes the data of one view, and `html.py` puts the data into
the page. All figures are computed here; the page only draws.
"""
