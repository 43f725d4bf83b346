"""Exports recordings to the formats of other tools: Perfetto, Chakra, TensorBoard, CSV, Markdown.

Each file has a function that returns the bytes of the exported file; `cli/export.py` calls it.
"""
