"""A CUDA device without a GPU, for simulated worlds.

`calls` lists how each call of `torch.cuda` is answered, and `runtime` patches torch accordingly.
`host` has the state of the devices, whose properties are in `gpus`. `device_memory` counts their
memory with the `caching_allocator`, from which `memory_statistics` answers; `tensor_memory` answers
for tensors. `simulated` lets fake tensors be on the device. `kernel_choices` and `autocast` make
torch choose the ops that it would choose on a GPU, and `workspaces` knows the memory that cuBLAS
and others allocate. Triton kernels are skipped (`triton_kernels`), and `inductor_dry_run` compiles
without generating any. For programs that run with data, `on_host` puts the CPU in place of GPUs.
"""
