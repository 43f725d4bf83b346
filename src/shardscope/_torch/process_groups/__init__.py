"""Process groups without a network.

`simulated` has groups of any size in which this process is one rank and nothing is sent, and
`simulated_tensors` the tensors without data that such a world computes with. `threaded` has groups
whose ranks are threads of this process, each with its own `rank_state`. `collective_semantics`
computes the results of all ranks from the inputs of all ranks.
"""
