"""The page of a recording over a local server, for runs that are too large for one file.

`served_page.py` makes the page; for a Parquet file with many collectives, `large_run.py` sums them
with DuckDB without making records of them, and `call_windows.py` answers the table of collectives,
a window of rows at a time. `server.py` listens.
"""
