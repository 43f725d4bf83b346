"""What to write instead of the lines that most often break graphs."""

from __future__ import annotations

import os

from shardscope.comm.stack import TORCH_FOLDER

__all__ = ["suggest_fix"]

_FSDP_FOLDER = os.path.join(TORCH_FOLDER, "distributed", "fsdp") + os.sep

# By words in torch's name for the break, and in its message: the first that fits.
_FIXES: tuple[tuple[str, str, str], ...] = (
    (
        "Tensor.item()",
        "",
        "keep the value a tensor (x * t instead of x * t.item()), or let graphs hold it: "
        "torch._dynamo.config.capture_scalar_outputs = True",
    ),
    (
        "Data-dependent branching",
        "",
        "compute both and choose: torch.where(cond, a, b); or torch.cond(cond, f, g, (x,))",
    ),
    (
        "Data-dependent assertion",
        "",
        "torch._assert_async(cond), or check before the compiled function is called",
    ),
    (
        "Dynamic shape operator",
        "",
        "use a form of fixed shape (torch.where(cond, x, 0) instead of x[cond]), or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    (
        "",
        "builtin operator `print`",
        "print outside the compiled function, or "
        "torch._dynamo.config.reorderable_logging_functions.add(print)",
    ),
    (
        "Call to `torch._dynamo.graph_break()`",
        "",
        "remove the call to torch._dynamo.graph_break()",
    ),
    (
        "Skip calling `torch.compiler.disable()`d function",
        "",
        "remove @torch.compiler.disable, or call the function before or after the compiled one",
    ),
    (
        "Attempt to trace generator",
        "",
        "collect the values in a list: return [f(x) for x in xs] instead of yield",
    ),
    (
        "logging.Logger method",
        "",
        "log outside the compiled function, or if not torch.compiler.is_compiling(): log(...)",
    ),
    (
        "RNN, GRU, or LSTM",
        "",
        "torch._dynamo.config.allow_rnn = True lets graphs hold them",
    ),
    (
        "Attempted to inline function marked as skipped",
        "",
        "call it outside the compiled function",
    ),
    (
        "Attempted to call function marked as skipped",
        "",
        "move the call out of the compiled function, or wrap it in @torch.library.custom_op",
    ),
    (
        "Unsupported context manager",
        "",
        "enter the context outside the compiled function: with ctx: compiled(x)",
    ),
    (
        "Failed to trace builtin operator",
        "",
        "do this outside the compiled function, or with an op of torch's",
    ),
    (
        "Unsupported function call",
        "",
        "call it outside the compiled function, or wrap it in @torch.library.custom_op",
    ),
    (
        "Observed exception",
        "",
        "check before the compiled function is called, and raise there",
    ),
    (
        "import",
        "",
        "import at the top of the file",
    ),
    (
        "backward()",
        "",
        "call .backward() outside the compiled function",
    ),
)


_TORCHS_OWN = "torch breaks the graph here itself: call this outside the compiled function"
_FSDP = (
    "FSDP's hooks cannot be part of a graph: compile the layers before they are sharded, one "
    "by one (layer.compile(); fully_shard(layer))"
)


def suggest_fix(kind: str, message: str, *, file: str = "") -> str:
    """An example of what to do about a break of that kind, or nothing."""
    if file.startswith(_FSDP_FOLDER):
        return _FSDP
    if file.startswith(TORCH_FOLDER) and "graph_break()" in kind:
        return _TORCHS_OWN
    for in_kind, in_message, fix in _FIXES:
        if in_kind.lower() in kind.lower() and in_message in message:
            return fix
    return ""
