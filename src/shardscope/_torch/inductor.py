"""Inductor: cache folders, passes that can be disabled, CPU vector instructions, settings."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardscope._torch.private import find_name

default_cache_dir = find_name(
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    "reuse inductor's precompiled headers in workers",
)
_HEADERS = "precompiled_headers"


def cache_folder() -> Path:
    """The user's folder of compiled kernels and of probes of the CPU's instructions."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def header_folder(*, temporary: Path | None = None) -> Path:
    """The folder of precompiled C++ headers, for this process or one with another temp folder."""
    default = Path(default_cache_dir())
    return (default if temporary is None else temporary / default.name) / _HEADERS


def probe_cpu_isa() -> None:
    """Probe the CPU's vector instructions in parallel, for Inductor, which would do it in turn."""
    if platform.machine() != "x86_64":  # other machines need no probe
        return
    with suppress(Exception):  # Inductor probes by itself, only slower
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

        supported = x86_isa_checker()
        candidates = [
            isa for isa in supported_vec_isa_list if set(str(isa).split()) <= set(supported)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(bool, candidates))


functorch_config = find_name("torch._functorch.config", "compile a graph again")
CompilerBisector = find_name(
    "torch._inductor.compiler_bisector.CompilerBisector", "disable parts of the compiler"
)

Answer = Callable[[str, str], bool]


@contextmanager
def asked_for_parts(may_apply: Answer) -> Iterator[None]:
    """Let `may_apply(subsystem, description)` decide whether a compiler pass is applied."""

    def is_disabled(
        backend: str, subsystem: str, debug_info: Callable[[], str] | None = None
    ) -> bool:
        return not may_apply(subsystem, _describe(subsystem, debug_info))

    with patch.object(CompilerBisector, "disable_subsystem", staticmethod(is_disabled)):
        yield


def _describe(subsystem: str, debug_info: Callable[[], str] | None) -> str:
    if subsystem == "lowerings":
        from torch._inductor.virtualized import V

        return str(V.get_current_node().target)
    if debug_info is None:
        return ""
    return debug_info().removeprefix("<OpOverload(op='").partition("'")[0]


@contextmanager
def inductor_settings(**changes: Any) -> Iterator[None]:
    """Change Inductor's settings until the context ends."""
    from torch._inductor import config

    with config.patch(changes):
        yield


@contextmanager
def without_caches() -> Iterator[None]:
    """Disable the caches of compiled graphs, so that each graph is compiled anew.

    The cache of kernels stays on: its keys are their sources, so it cannot be stale, and without it
    Inductor would precompile its header each time, which takes many seconds.
    """
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


@contextmanager
def generated_code(keep: Callable[[str], None]) -> Iterator[None]:
    """Call `keep` with the source of each module that Inductor generates."""
    from torch._inductor.graph import GraphLowering

    with patch.object(GraphLowering, "save_output_code", staticmethod(keep)):
        yield


_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
# torch sets these by itself when it compiles.
_SET_BY_TORCH = (
    "torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access ",
    "torch._inductor.config.deterministic ",
)
_FLAGS = {
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cudnn.deterministic": False,
    "torch.backends.cudnn.allow_tf32": True,
}


def read_settings() -> tuple[str, ...]:
    """Lines of Python that set all of torch's settings that differ from the defaults."""
    return (*_read_torch(), *_read_configs())


def _read_torch() -> Iterator[str]:
    if torch.get_default_dtype() is not torch.float32:
        yield f"torch.set_default_dtype({torch.get_default_dtype()})"
    if torch.get_float32_matmul_precision() != "highest":
        yield f"torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r})"
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        yield f"torch.use_deterministic_algorithms(True, warn_only={warns})"
    for name, default in _FLAGS.items():
        module, _, flag = name.rpartition(".")
        value = getattr(sys.modules[module], flag)
        if value != default:
            yield f"{name} = {value!r}"


def _read_configs() -> Iterator[str]:
    for name in _CONFIGS:
        if name in sys.modules:  # a module that was not loaded has its defaults
            changed = sys.modules[name].codegen_config().splitlines()
            lines = [line for line in changed if not line.startswith(_SET_BY_TORCH)]
            yield from ([f"import {name}", *lines] if lines else [])


def apply_settings(lines: Sequence[str]) -> None:
    """Execute the lines of `read_settings`; lines that fail in this process are skipped."""
    for line in lines:
        if line.startswith("import "):
            importlib.import_module(line.removeprefix("import "))
        else:
            with suppress(Exception):
                exec(line, {"torch": torch})
