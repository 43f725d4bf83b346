"""How long the stages of torch.compile took."""

from __future__ import annotations

from shardscope._torch.private import find_name, is_missing

__all__ = ["Durations", "read_durations"]

compilation_time_metrics = find_name(
    "torch._dynamo.utils.compilation_time_metrics", "measure compile times"
)

Durations = dict[str, tuple[int, float]]

_STAGES = {
    "frames": "_compile.compile_inner",
    "tracing": "bytecode_tracing",
    "guards": "build_guards",
    "backend": "OutputGraph.call_user_compiler",
    "aot": "create_aot_dispatcher_function",
    "inductor": "compile_fx_inner",
    # AOT autograd compiles backward when it first runs, which no other stage includes.
    "backward": "backward._backward_impl",
    "inductor in backward": "compile_fx.<locals>.bw_compiler",
}


def read_durations() -> Durations:
    """How often each stage ran in this process, and for how many seconds with what it calls."""
    if is_missing(compilation_time_metrics):
        return {}
    return {
        stage: (len(times), sum(times))
        for stage, name in _STAGES.items()
        for times in (compilation_time_metrics.get(name, ()),)
    }
