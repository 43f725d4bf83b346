"""Infer the types of torchtitan's Llama 3 debug model, and compare them with its annotations.

    PYTHONPATH=/path/to/torchtitan python benchmarks/torchtitan_types.py tp=2 --checker

Needs a checkout of torchtitan whose default backend is spmd_types, its dependencies, and the torch
that it is written for. The model has one layer, and its attention, which has a kernel for GPUs
only, is computed by torch's scaled_dot_product_attention. Annotations are those that torchtitan
gives to parameters and buffers when it shards the model; with `--checker` the model runs under the
checker of spmd_types, which annotates all tensors.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardscope import infer_types, show

NUM_SEQUENCES, LENGTH = 2, 8


def read_mesh(text: str) -> dict[str, int]:
    """`{"dp": 2, "tp": 2}` for `dp=2,tp=2`."""
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(size) for name, size in pairs}


def attend(self: nn.Module, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, **options: Any) -> Tensor:  # noqa: N803
    """Causal attention of tokens × heads × dim within each sequence, which a CPU can compute."""
    q, k, v = (t.unflatten(0, (-1, LENGTH)).transpose(1, 2) for t in (q_TNH, k_TNH, v_TNH))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=options.get("scale"), enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def let_checker_run_in_threads() -> None:
    """Install the checker's patches once, for all ranks, and check nothing that shardscope does."""
    import spmd_types
    from spmd_types import _backward_hooks, _checker, _vmap

    from shardscope.parallel.equivalence import step
    from shardscope.parallel.parity.probe import ModuleProbe

    for module, install, uninstall in (
        (_checker, "_install_autograd_apply_patch", "_remove_autograd_apply_patch"),
        (_vmap, "install", "uninstall"),
        (_backward_hooks, "install", "uninstall"),
    ):
        getattr(module, install)()
        setattr(module, install, lambda: None)
        setattr(module, uninstall, lambda: None)
    for owner, name in ((ModuleProbe, "_record"), (step._BackwardCounter, "register")):
        setattr(owner, name, spmd_types.no_typecheck()(getattr(owner, name)))


def main(mesh: dict[str, int], *, has_checker: bool) -> None:
    """Build the model on a single device, infer its types on the mesh, and print them."""
    import spmd_types
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import model_registry

    warnings.simplefilter("ignore")
    if has_checker:
        let_checker_run_in_threads()
    parallel_dims.device_type = "cpu"
    attention.VarlenAttention.forward = attend
    utils.set_spmd_backend("spmd_types")
    dp, tp = mesh.get("dp", 1), mesh.get("tp", 1)
    parallelism = ParallelismConfig(data_parallel_shard_degree=dp, tensor_parallel_degree=tp)
    training = TrainingConfig()
    training.mixed_precision_param = training.mixed_precision_reduce = "float32"
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:1]
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))

    def parallelize(model: nn.Module, _: Any) -> nn.Module:
        sizes = {"dp_replicate": 1, "dp_shard": dp, "cp": 1, "tp": tp, "pp": 1, "ep": 1}
        dims = ParallelDims(**sizes, world_size=dp * tp, spmd_backend="spmd_types")
        context = utils.get_spmd_context(parallel_dims=dims)
        with context(), tempfile.TemporaryDirectory() as folder:
            model = spec.parallelize_fn(
                model,
                parallel_dims=dims,
                training=training,
                parallelism=parallelism,
                compile_config=CompileConfig(),
                ac_config=None,
                dump_folder=folder,
            )
        checked = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=has_checker)
        object.__setattr__(model, "run", (checked, dims))
        return model

    def step(model: nn.Module, tokens: Tensor) -> None:
        context, dims = getattr(model, "run", (contextlib.nullcontext, None))
        positions, labels = torch.arange(len(tokens)) % LENGTH, tokens.clone()
        with context():
            if dims is not None and has_checker:
                annotate_input_spmd_types(dims, tokens, labels, {"positions": positions})
            output = model(tokens, positions)
            with spmd_types.no_typecheck():
                loss = output.square().sum()
        loss.backward()

    model = spec.model.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    recording = infer_types(
        model,
        mesh,
        inputs=torch.randint(0, 2048, (NUM_SEQUENCES * LENGTH,)),
        parallelize=parallelize,
        step=step,
        batch_axes=[axis for axis in ("dp",) if axis in mesh],
    )
    show(recording)
    (types,) = recording.types
    num_declared, num_agreeing = types.count_declared()
    print(f"{num_agreeing} of {num_declared} declared types agree with the values")


if __name__ == "__main__":
    torch.manual_seed(0)
    options = [option for option in sys.argv[1:] if option != "--checker"]
    main(read_mesh(options[0] if options else "tp=2"), has_checker="--checker" in sys.argv)
