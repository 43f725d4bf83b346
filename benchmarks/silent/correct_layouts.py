"""Ways to make the models of the correct programs parallel: torch's, and collectives by hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.silent.correct_models import Batch, BatchNorm
from benchmarks.silent.correct_steps import LossOfElements
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Layout:
    """A way to run a model on the ranks of a mesh; by default every rank does everything."""

    name = "replicated"
    data_axes: tuple[str, ...] = ()
    stage_axes: tuple[str, ...] = ()
    is_averaging = False
    batch_axes: tuple[str, ...] = ()  # along which parity shards the batch
    batch_dim = 0
    loss_context: Any = nullcontext

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = dict(mesh)

    @property
    def label(self) -> str:
        """The name with the sizes of the mesh."""
        return "-".join([self.name, *(f"{name}{size}" for name, size in self.mesh.items())])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The model of a rank."""
        return model

    def split(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        """The part of the batch that parity gave the rank which the rank uses."""
        return batch

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """The context of forward and backward of a micro-batch."""
        return nullcontext()

    def forward(self, model: nn.Module, batch: Batch, mesh: DeviceMesh) -> Any:
        """What the model computes."""
        return model(batch)

    def losses(
        self, outputs: Any, batch: Batch, elements: LossOfElements, mesh: DeviceMesh
    ) -> Tensor:
        """The loss of each sample or token of this rank."""
        return elements(outputs, batch)

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """What remains to be done after backward."""

    def sharded_axes(self, name: str) -> dict[str, int]:
        """The mesh axes that shard a parameter that is a plain tensor, with the dim."""
        return {}


class DDP(Layout):
    """Replicas whose gradients DistributedDataParallel averages."""

    name = "ddp"
    is_averaging = True

    def __init__(
        self, mesh: Mapping[str, int], *, has_no_sync: bool = False, **options: Any
    ) -> None:
        super().__init__(mesh)
        self.data_axes = self.batch_axes = tuple(mesh)
        self.has_no_sync, self.options = has_no_sync, options
        self.name = "-".join(["ddp", *(["no_sync"] if has_no_sync else []), *options])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.group = mesh.get_group()
        return DistributedDataParallel(model, process_group=mesh.get_group(), **self.options)

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync() if self.has_no_sync and not is_last else nullcontext()


class FSDP(Layout):
    """fully_shard of every layer and of the model, on a mesh of one axis or with replicas."""

    name = "fsdp"
    is_averaging = True

    def __init__(
        self,
        mesh: Mapping[str, int],
        *,
        dtype: torch.dtype | None = None,
        is_deferred: bool = False,
        is_kept: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.data_axes = self.batch_axes = tuple(mesh)
        self.dtype, self.is_deferred, self.is_kept = dtype, is_deferred, is_kept
        self.name = "fsdp" if len(mesh) == 1 else "hsdp"
        self.name += "-bf16" if dtype else ""
        self.name += "-deferred" if is_deferred else ""
        self.name += "-kept" if is_kept else ""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.group = mesh.get_group()
        return self.shard(model, mesh)

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Apply fully_shard to blocks and the root."""
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if self.dtype else {}
        if self.is_kept:
            options["reshard_after_forward"] = False
        for layer in list_blocks(model):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        if self.is_deferred:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(is_last)
        return nullcontext()


def list_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a language model, or the linear layers and convolutions of another one."""
    if hasattr(model, "layers"):
        return list(model.layers.values())
    kinds = (nn.Conv2d, nn.RNNBase)
    return [module for module in model.children() if isinstance(module, kinds)]


MLP_STYLES: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
BLOCK_STYLES: dict[str, Any] = {
    "attn.wq": ColwiseParallel(),
    "attn.wk": ColwiseParallel(),
    "attn.wv": ColwiseParallel(),
    "attn.wo": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def gather_sequence() -> PrepareModuleInput:
    """All-gather a sharded sequence before a module."""
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )


def gather_first(num_others: int) -> PrepareModuleInput:
    """All-gather the first of several inputs of a module."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), *[None] * num_others),
        desired_input_layouts=(Replicate(), *[None] * num_others),
        use_local_output=True,
    )


class TensorParallel(Layout):
    """torch's styles: columns and rows of linear layers, sharded vocabularies and sequences."""

    name = "tp"

    def __init__(
        self,
        mesh: Mapping[str, int],
        *,
        is_sequence: bool = False,
        has_sharded_loss: bool = False,
        has_vocabulary: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.is_sequence, self.has_sharded_loss = is_sequence, has_sharded_loss
        self.has_vocabulary = has_vocabulary
        self.name = "sp" if is_sequence else "tp"
        self.name += "-vocabulary" if has_vocabulary else ""
        if has_sharded_loss:
            self.name += "-loss_parallel"
            self.loss_context = loss_parallel

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return self.shard(model, mesh["tp"])

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Apply the styles along the axis tp."""
        if not hasattr(model, "layers"):
            return parallelize_module(model, mesh, MLP_STYLES)
        styles: dict[str, Any] = {}
        if self.has_vocabulary:
            layout = Shard(1) if self.is_sequence else Replicate()
            styles["tok"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
        elif self.is_sequence:
            styles["tok"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            )
        if self.is_sequence:
            styles["pos"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(0)
            )
            styles["norm"] = SequenceParallel()
        layout = Shard(1) if self.is_sequence else Replicate()
        if self.has_sharded_loss:
            styles["head"] = ColwiseParallel(
                input_layouts=layout, output_layouts=Shard(-1), use_local_output=False
            )
        elif self.has_vocabulary or self.is_sequence:
            styles["head"] = ColwiseParallel(input_layouts=layout, output_layouts=Replicate())
        if styles:
            parallelize_module(model, mesh, styles)
        for layer in list_blocks(model):
            parallelize_module(layer, mesh, self.block_styles())
        return model

    def block_styles(self) -> dict[str, Any]:
        """The styles of a block."""
        if not self.is_sequence:
            return BLOCK_STYLES
        return {
            **BLOCK_STYLES,
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attn": gather_first(1),
            "mlp": gather_sequence(),
            "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.loss_context()
        return context

    def losses(
        self, outputs: Any, batch: Batch, elements: LossOfElements, mesh: DeviceMesh
    ) -> Tensor:
        losses = elements(outputs, batch)
        return losses.to_local() if isinstance(losses, DTensor) else losses


class ShardedTensorParallel(TensorParallel):
    """fully_shard of a model that is sharded along tp already."""

    is_averaging = True

    def __init__(self, mesh: Mapping[str, int], **options: Any) -> None:
        super().__init__(mesh, **options)
        self.name = f"fsdp-{self.name}"
        self.data_axes = self.batch_axes = ("dp",)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.shard(model, mesh["tp"])
        return FSDP({"dp": mesh["dp"].size()}).shard(model, mesh["dp"])


class ReplicatedTensorParallel(TensorParallel):
    """Replicas of a model that is sharded along tp, whose gradients hooks sum over dp."""

    def __init__(self, mesh: Mapping[str, int], **options: Any) -> None:
        super().__init__(mesh, **options)
        self.name = f"hooks-{self.name}"
        self.data_axes = self.batch_axes = ("dp",)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.shard(model, mesh["tp"])
        return model

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(local, group=mesh.get_group("dp"))


class Buckets(Layout):
    """Replicas whose gradients are flattened into a bucket and summed by hand."""

    name = "buckets"

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__(mesh)
        self.data_axes = self.batch_axes = tuple(mesh)

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        for axis in self.data_axes:
            dist.all_reduce(bucket, group=mesh.get_group(axis))
        parts = bucket.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class ReduceScattered(Buckets):
    """A bucket that is reduce-scattered, and gathered again, as with a sharded optimizer."""

    name = "reduce_scattered"

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        (axis,) = self.data_axes
        group, size = mesh.get_group(axis), mesh[axis].size()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        padded = torch.cat([bucket, bucket.new_zeros(-bucket.numel() % size)])
        shard = padded.new_empty(padded.numel() // size)
        dist.reduce_scatter_tensor(shard, padded, group=group)
        dist.all_gather_into_tensor(padded, shard, group=group)
        parts = padded[: bucket.numel()].split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
