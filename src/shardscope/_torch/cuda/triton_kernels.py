"""Triton kernels that a program launches itself, which are skipped where tensors have no data.

A kernel allocates nothing: it writes to tensors that exist. So shapes, memory and collectives are
the same without it, and the values of its tensors are not known afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, final

from shardscope._torch.cuda.runtime import replace_attribute
from shardscope._torch.fake import FakeTensor
from shardscope._torch.tree import leaves

OnKernel = Callable[[str], None]
"""Called with the name of a kernel that is not run."""

# Triton's classes of kernels, by their modules. Importing them takes half a second, so that they
# are patched only when the program imports them.
_CLASSES = {"triton.runtime.autotuner": "Autotuner", "triton.runtime.jit": "JITFunction"}


@contextmanager
def skipped_triton_kernels(on_kernel: OnKernel) -> Iterator[None]:
    """Skip kernels that are launched on tensors without data until the context ends."""
    with ExitStack() as stack:

        def patch(module: ModuleType) -> None:
            kernel_class = getattr(module, _CLASSES[module.__name__], None)
            if kernel_class is not None:
                run = _skip_without_data(kernel_class.run, on_kernel)
                replace_attribute(stack, kernel_class, "run", run)

        for name in _CLASSES:
            if name in sys.modules:
                patch(sys.modules[name])
        finder = _Finder(patch)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


@final
class _Finder:
    """Calls a function with each of Triton's modules in `_CLASSES` after its import."""

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self._on_import = on_import

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of such a module, with the call after its execution."""
        spec = PathFinder.find_spec(name, path, target) if name in _CLASSES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_report(module: ModuleType) -> None:
            execute(module)
            self._on_import(module)

        spec.loader.exec_module = execute_and_report
        return spec


def _skip_without_data(run: Callable[..., Any], on_kernel: OnKernel) -> Callable[..., Any]:
    def run_or_skip(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not tensors:
            return run(kernel, *args, **kwargs)
        for tensor in tensors:
            tensor.constant = None  # it may be written to
        on_kernel(_find_name(kernel))
        return None

    return run_or_skip


def _find_name(kernel: Any) -> str:
    """The name of the function behind a kernel and what wraps it, such as an autotuner."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", "?"))
