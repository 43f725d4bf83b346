"""Infer the types of torchtitan's Llama 3 debug model, and compare them with its annotations.

    cd /path/to/torchtitan && PYTHONPATH=. python /path/to/benchmarks/torchtitan_types.py dp=2,tp=2

Needs a checkout of torchtitan whose default backend is spmd_types, its dependencies, and the torch
that it is written for. The model has one layer, and its attention, which has a kernel for GPUs
only, is computed by torch's scaled_dot_product_attention. Annotations are those that torchtitan
gives to parameters and buffers when it shards the model.
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


def main(mesh: dict[str, int]) -> None:
    """Build the model on a single device, infer its types on the mesh, and print them."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import model_registry

    warnings.simplefilter("ignore")
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
        object.__setattr__(model, "spmd_context", context)
        return model

    def step(model: nn.Module, tokens: Tensor) -> None:
        with getattr(model, "spmd_context", contextlib.nullcontext)():
            model(tokens, torch.arange(len(tokens)) % LENGTH).square().mean().backward()

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
    main(read_mesh(sys.argv[1] if len(sys.argv) > 1 else "tp=2"))
