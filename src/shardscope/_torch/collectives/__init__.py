"""Collectives as torch issues them.

`schema` is the table of all collective ops and of what their arguments mean; `events` and `hooks`
report every collective to observers, once each; `functional` has the ops that can be nodes of a
graph; `objects` replaces the bodies of object collectives, such as `all_gather_object`.
"""
