"""A CUDA device without a GPU, for simulated worlds.

`runtime` answers `torch.cuda`, `simulated` lets fake tensors be on the device, `kernel_choices`
and `autocast` make torch choose the ops that it would choose on a GPU, `workspaces` knows the
memory that cuBLAS and others allocate, and `inductor_dry_run` compiles without generating kernels.
"""
