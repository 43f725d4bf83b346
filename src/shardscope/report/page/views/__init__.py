"""What fills a page from a recording: a file for each view."""
