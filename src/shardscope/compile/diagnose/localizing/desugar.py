"""Graphs on DTensors as plain ones: what this rank computes on its pieces, run by it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.aot_stages import AotRun, Handed, run_ahead, watched_aot
from shardscope._torch.compiler_parts import without_caches
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.localizing.collectives import make_local

__all__ = ["desugar", "needs_desugaring"]

_METHODS = ("full_tensor", "redistribute", "to_local")


def needs_desugaring(fragment: Fragment) -> bool:
    """Whether DTensors or meshes go into the graph, or are made in it."""
    return any(isinstance(one, DTensor | DeviceMesh) for one in fragment.inputs) or any(
        _makes_dtensors(node) for node in fragment.graph.graph.nodes
    )


def _makes_dtensors(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith("torch.distributed.tensor")


def desugar(fragment: Fragment) -> Fragment:
    """The forward as ATen ops on this rank's tensors, with collectives made local.

    Call it in the world that the DTensors belong to. Nodes know the user's lines; gradients are
    asked for where they were, and taken by autograd from the plain ops.
    """
    run = AotRun(has_own_compilers=False, keeps_graphs=True)
    with watched_aot(run), without_caches(), torch.no_grad():
        run_ahead(fragment.graph, [_detach(one) for one in fragment.inputs])
    (handed,) = run.handed
    return make_local(replace(fragment, graph=handed.graph, inputs=_inputs(handed, fragment)))


def _detach(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _inputs(handed: Handed, fragment: Fragment) -> tuple[Any, ...]:
    """What the traced graph was given, with gradients asked for as the fragment does."""
    assert handed.inputs is not None
    tensors = [one for one in handed.inputs if isinstance(one, torch.Tensor)]
    wanted = [one.requires_grad for one in fragment.inputs if isinstance(one, torch.Tensor)]
    # A DTensor is one tensor of this rank's; where that is not so, nobody knows which is whose.
    if len(tensors) == len(wanted):
        for tensor, is_wanted in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(is_wanted)
    return handed.inputs
