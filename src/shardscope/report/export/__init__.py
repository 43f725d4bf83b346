"""Exports recordings to other tools: Perfetto, Chakra, TensorBoard, CSV, Markdown."""
