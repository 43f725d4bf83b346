"""Any part of a fragment, as a fragment of its own."""
