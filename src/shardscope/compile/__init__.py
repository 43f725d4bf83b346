"""torch.compile: debugging backends, explanations of graph breaks, diagnosis of wrong results.

`backends` are registered with torch by name, some of them inject faults. `explain` reports graphs,
graph breaks and recompilations. `diagnose` finds which ops and which stage of the compiler make a
function wrong, and writes a script that shows it. `call_state` lists and restores the state that a
call can change; `explain` and `diagnose` use it to leave the user's program as it was.
"""
