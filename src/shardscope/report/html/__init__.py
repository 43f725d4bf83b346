"""Renders a recording as one HTML page. The data of each view is computed here; the page draws."""
