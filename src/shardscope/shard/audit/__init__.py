"""`audit(model)`: every module, parameter and buffer with its placements, and what is wrong with
them.
"""
