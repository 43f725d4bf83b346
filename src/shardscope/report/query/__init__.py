"""SQL over the tables of recordings, with DuckDB.

`database.py` opens recordings and runs queries on them; `results.py` writes what a query gives.
"""
