"""Worker processes, in which a compiler may crash, hang and write files without effect on the
user's process.
"""
