"""The only package that uses private names of torch, one module per subsystem of torch.

A private name is looked up with the reason it is needed (`private.find_name`), and has a canary
test that fails with a sentence when torch moves the name.
"""
