"""TORCH'S INSIDES: the only folder that touches private torch names.

One shim per need, each with a canary test that fails with a sentence when torch moves a name.
"""
