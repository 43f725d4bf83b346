"""A CUDA device without a GPU, for simulated worlds.

`calls` lists how each call of `torch.cuda` is answered, and `runtime` patches torch by it. `host`
and `device_memory` have the state of the devices, `tensor_memory` that of tensors; `simulated` lets
fake tensors be on the device. `kernel_choices` and `autocast` make torch choose the ops that it
would choose on a GPU, `workspaces` knows the memory that cuBLAS and others allocate. Triton kernels
are skipped (`triton_kernels`), and `inductor_dry_run` compiles without generating any.
"""
