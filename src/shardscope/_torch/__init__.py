"""The only package that uses private names of torch, one module per subsystem of torch.

A private name is looked up with the reason it is needed (`private.find_name`), and has a canary
test that fails with a sentence when torch moves the name. Below are `collectives` (schemas and
hooks), `process_groups` (simulated and threaded ranks) and `cuda` (a simulated device); beside them
are modules for the dispatcher, autograd, DTensor, FSDP, DDP, dynamo, AOT autograd and Inductor.
Nothing is imported here: each caller imports the subsystem it needs.
"""
