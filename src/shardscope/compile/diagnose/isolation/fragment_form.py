"""Fragments as plain data, and the checks that all of one can travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from shardscope._torch.fakes import is_fake
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.graph_form import (
    GraphForm,
    build_graph,
    describe_graph,
    settle,
)
from shardscope.errors import CompileError

__all__ = ["FragmentForm", "build_fragment", "describe_fragment"]


@final
@dataclass(frozen=True)
class FragmentForm:
    """A fragment whose graph is plain data."""

    graph: GraphForm
    inputs: tuple[Any, ...]
    with_gradients: bool
    has_open_sizes: bool


def describe_fragment(fragment: Fragment) -> FragmentForm:
    """Raises CompileError if a tensor of it has no data."""
    form = describe_graph(fragment.graph)
    names = (node.name for node in form.nodes if node.op == "placeholder")
    for name, value in (*zip(names, fragment.inputs, strict=True), *_held(form)):
        if isinstance(value, torch.Tensor) and (lack := _find_lack(value)):
            raise CompileError(
                f"'{name}' of the graph has no data ({lack}), so nothing can be computed with it. "
                f"Call the function with tensors that have data."
            )
    inputs = tuple(settle(value) for value in fragment.inputs)
    return FragmentForm(form, inputs, fragment.with_gradients, fragment.has_open_sizes)


def build_fragment(form: FragmentForm) -> Fragment:
    """The fragment that was described."""
    graph = build_graph(form.graph)
    return Fragment(graph, form.inputs, form.with_gradients, form.has_open_sizes)


def _held(form: GraphForm) -> Iterator[tuple[str, Any]]:
    for name, value in form.held.items():
        if isinstance(value, GraphForm):
            yield from _held(value)
        else:
            yield name, value


def _find_lack(tensor: torch.Tensor) -> str:
    """Why a tensor has no data; empty if it has."""
    if is_fake(tensor):
        return "it is fake"
    if tensor.is_meta:
        return "it is on the meta device"
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and tensor.layout is torch.strided and tensor.numel():
        return "" if tensor.untyped_storage().nbytes() else "its memory has been freed"
    return ""
