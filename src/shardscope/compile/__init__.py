"""torch.compile: debugging backends, explanations of graph breaks, diagnosis of wrong results.

`backends` are registered with torch by name, some of them inject faults. `explain` reports graphs,
graph breaks and recompilations. `diagnose` finds which ops and which stage of the compiler make a
function wrong, and writes a script that shows it. `call_state` lists the state that a call can
change, and `preserved_state` restores it, so that the user's program stays as it was.
"""
