"""Excludes our own code, which runs inside the user's, from torch.compile."""

from __future__ import annotations

from types import CodeType

from shardscope._torch.private import find_name, is_missing

_NEED = "exclude shardscope's own code from torch.compile"
_EVAL_FRAME = "torch._C._dynamo.eval_frame"

_set_strategy = find_name(f"{_EVAL_FRAME}.set_code_exec_strategy", _NEED)
_make_strategy = find_name(f"{_EVAL_FRAME}._FrameExecStrategy", _NEED)
_SKIP = find_name(f"{_EVAL_FRAME}._FrameAction.SKIP", _NEED)
_HAS_ALL = not any(map(is_missing, (_set_strategy, _make_strategy, _SKIP)))


def skip_dynamo(code: CodeType) -> None:
    """Never compile `code`, nor functions that it calls."""
    if _HAS_ALL:
        _set_strategy(code, _make_strategy(_SKIP, _SKIP))
