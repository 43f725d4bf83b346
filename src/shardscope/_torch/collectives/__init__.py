"""Collectives as torch issues them: op schemas, hooks that observe every collective, functional
collectives and object collectives.
"""
