"""Where something came from: module names, call sites, the running module, the run and its rank.

Every instrument charges what it observes to a module (`module_names`, `module_calls`), a line of
the user's program (`call_sites`) and a run (`program_records`); `spans` measures
named phases, and `tensors` finds tensors in a model's arguments and results. The package imports
`_torch` and `world`, and none of the instruments.
"""
