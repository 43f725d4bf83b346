"""Other processes: where a compiler may crash, hang and write without harm to the user's own."""
