"""The catalog of tools of `shardscope mcp`, with the texts that tell an agent when to use which."""

from __future__ import annotations

from pathlib import Path

from shardscope.cli.mcp_tools import Argument, Tool


def read_skill() -> str:
    """The skill file as Markdown, with `name` and `description` as YAML front matter."""
    path = Path(__file__).resolve().parents[1] / "skill" / "SKILL.md"
    return path.read_text(encoding="utf-8")


def _text(name: str, text: str, option: str = "", *, is_required: bool = False) -> Argument:
    return Argument(name=name, kind="string", text=text, option=option, is_required=is_required)


def _number(name: str, text: str, option: str) -> Argument:
    return Argument(name=name, kind="integer", text=text, option=option)


def _flag(name: str, text: str, option: str) -> Argument:
    return Argument(name=name, kind="boolean", text=text, option=option)


def _list(name: str, text: str, option: str = "", *, is_required: bool = False) -> Argument:
    return Argument(name=name, kind="array", text=text, option=option, is_required=is_required)


_TARGET = _text(
    "target",
    "File (train.py) or module (package.train) that defines model() and batch(model), and "
    "optionally parallelize(model, mesh), step(model, batch), optimizer(model), loss(output) or a "
    "plan.",
)
_MESH = _text("mesh", "For target: mesh axes and sizes, such as dp=8,tp=4.", "--mesh")
_RANK = _number("rank", "For target: rank to simulate. Default: 0.", "--rank")
_CLUSTER = (
    _number("nnodes", "For program: number of nodes. Default: 1.", "--nnodes"),
    _number("nproc_per_node", "For program: GPUs per node. Default: 8.", "--nproc-per-node"),
)
_RANKS = _text(
    "ranks", "For program: ranks to run: 0,8-15, all, or roles (each pipeline stage).", "--ranks"
)
_STEPS = _number("steps", "Training steps to run.", "--steps")
_GPU = Argument(
    name="gpu",
    kind="string",
    text="For program: GPU to simulate. Default: h200.",
    option="--gpu",
    choices=("h200", "h100", "a100", "b200"),
)
_OUTPUT = (
    _text(
        "output", "File for the recording (.json.gz). Default: NAME.shardscope.json.gz.", "--output"
    ),
    _flag("force", "Overwrite the recording if it exists.", "--force"),
)
_FILES = _list("files", "Recordings; several are shown as one run.", is_required=True)
_MODULE = _text(
    "module", "Only modules that match, such as 'layers.*.attention' or '**.wq'.", "--module"
)

TOOLS = (
    Tool(
        name="run",
        title="Run a training script on a simulated cluster",
        text="Start here for a training script: run it unmodified, without GPUs, as ranks of a "
        "simulated cluster of any size, for a few steps. Reports what it communicates and why, "
        "its peak memory and whether it fits, how parameters are sharded, graph breaks, and "
        "problems with remedies. For hangs give ranks=all: it names the line where ranks issue "
        "different collectives. Executes the script.",
        arguments=(
            *_CLUSTER,
            _RANKS,
            _STEPS,
            _GPU,
            _flag("data", "Compute real numbers, all ranks on this machine's CPU.", "--data"),
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="trace",
        title="Trace collectives",
        text="Which collectives a training step issues, how many bytes on which mesh axis, why "
        "(FSDP, DDP, an implicit DTensor redistribution, a call) and from which source line. Use "
        "it for unexpected or slow communication. Executes the target or program; needs no GPU.",
        arguments=(_TARGET, _MESH, _RANK, *_CLUSTER, _RANKS, _STEPS, *_OUTPUT),
        takes_program=True,
    ),
    Tool(
        name="memory",
        title="Estimate GPU memory",
        text="Peak GPU memory of a training step by kind and by module, and whether it fits, "
        "before anything is launched; says what to change if it does not. Use it for "
        "out-of-memory errors and for choosing batch size, sharding or checkpointing. Executes "
        "the target or program; needs no GPU.",
        arguments=(
            _TARGET,
            _MESH,
            _RANK,
            _text("gpu_memory", "For target: memory of a GPU, such as 80GiB.", "--gpu-memory"),
            *_CLUSTER,
            _RANKS,
            _GPU,
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="audit",
        title="Audit sharding",
        text="How each parameter is placed on the mesh, and what is wrong: parameters that a plan "
        "missed, replicated large ones, broken ties, FSDP roots, plain tensors mixed with "
        "DTensors. Use it after changing a parallelize plan. Executes the target or program.",
        arguments=(
            _TARGET,
            _MESH,
            _RANK,
            _flag("no_step", "For target: inspect the model without running a step.", "--no-step"),
            *_CLUSTER,
            _RANKS,
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="coverage",
        title="Find ops that do not shard",
        text="Which ops of a model can run on sharded tensors, forward and backward, and which "
        "block sharding, with lines and remedies. Use it before writing a plan, or when DTensor "
        "raises for an op. Executes the target or program.",
        arguments=(_TARGET, _MESH, *_CLUSTER, *_OUTPUT),
        takes_program=True,
    ),
    Tool(
        name="parity",
        title="Compare with a single device",
        text="Whether the parallel model computes the same outputs, gradients and buffers as a "
        "single device, judged by measured rounding noise; if not, the first module and op that "
        "differ and the likely cause. Use it after every change of parallel code, and when a loss "
        "curve differs. Executes the target or program on the CPU: keep the model small.",
        arguments=(
            _TARGET,
            _text("mesh", "For target: mesh axes and sizes. Default: tp=2.", "--mesh"),
            _list(
                "batch_axes", "For target: axes over which the batch is sharded.", "--batch-axis"
            ),
            Argument(
                name="precision",
                kind="string",
                text="For target: lowest precision of the parallel model. Default: its own.",
                option="--precision",
                choices=("bf16", "fp16", "fp32"),
            ),
            *_CLUSTER,
            _text(
                "single_args",
                "For program: arguments added where it runs as a single process: '--tp 1'.",
                "--single-args",
            ),
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="check",
        title="Find hangs before launch",
        text="Whether the ranks of a training script would wait for each other forever: runs it as "
        "several ranks and compares their collectives, then again as if some ranks saw another "
        "batch, NaN, an exception or a later clock. Names the ranks, the line, the condition and "
        "the remedy, and what was not tried. Use it before a launch and after a change of control "
        "flow around collectives. Executes the target or program several times; needs no GPU.",
        arguments=(
            _TARGET,
            _text("mesh", "For target: mesh axes and sizes. Default: dp=2.", "--mesh"),
            _list(
                "batch_axes", "For target: axes over which the batch is sharded.", "--batch-axis"
            ),
            *_CLUSTER,
            _STEPS,
            _GPU,
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="explain",
        title="Explain torch.compile",
        text="How many graphs torch.compile captures, which lines break them and what to write "
        "instead, which guards cause recompilations, which functions run eagerly. Executes the "
        "target or program.",
        arguments=(
            _TARGET,
            _MESH,
            _text("backend", "For target: backend of torch.compile.", "--backend"),
            _STEPS,
            *_CLUSTER,
            _RANKS,
            *_OUTPUT,
        ),
        takes_program=True,
    ),
    Tool(
        name="diagnose",
        title="Diagnose a compiled model",
        text="Whether the compiled model computes what eager does; if not, the op, the compiler "
        "stage, and a minimal repro.py that needs torch alone. Use it for wrong results, NaN, "
        "crashes or errors under torch.compile. May take minutes. Executes the target.",
        arguments=(
            _text("target", _TARGET.text, is_required=True),
            _MESH,
            _text("backend", "Backend of torch.compile. Default: inductor.", "--backend"),
            _text("mode", "Mode of torch.compile, such as max-autotune.", "--mode"),
            _list("options", "Options for the backend, such as op=relu.", "--option"),
            _text("folder", "Folder for repro.py. Default: a new folder.", "--folder"),
            _number("max_queries", "Most compilations. Default: 200.", "--max-queries"),
            *_OUTPUT,
        ),
    ),
    Tool(
        name="diff",
        title="Compare two recordings",
        text="What changed between two recordings: collectives, bytes, causes, memory, graph "
        "breaks, placements, findings; worse changes first. Use it after a code change: record "
        "before and after with the same tool, then compare.",
        arguments=(
            _text("before", "Recording before the change.", is_required=True),
            _text("after", "Recording after the change.", is_required=True),
            _list("areas", "Only these areas, such as memory, bytes, graph-breaks.", "--area"),
            _MODULE,
            _text("tolerance", "Ignore changes of bytes up to this share: 5%.", "--tolerance"),
        ),
        runs_code=False,
    ),
    Tool(
        name="hang",
        title="Explain why a run hangs",
        text="The likely cause of a hang on a cluster, from files that its ranks left behind: who "
        "waits for whom, the first divergence, which rank is behind and why, and what the files "
        "cannot say. Reads streams, Flight Recorder dumps, ncclras output, NCCL logs, stacks, "
        "TORCH_TRACE folders and logs of the run, in any mixture. If nothing hangs, it names the "
        "rank that the others waited for.",
        arguments=(_list("files", "Files, folders or patterns.", is_required=True),),
        runs_code=False,
    ),
    Tool(
        name="compare",
        title="Compare the values of two real runs",
        text="The first training step, module and tensor whose values differ between two runs of a "
        "cluster by more than rounding, whatever their layouts. Both must have been recorded with "
        "trace(model, values=…). Use it when a loss curve differs between two runs; for what the "
        "programs do use diff.",
        arguments=(
            _text("run_a", "Recording, folder or pattern of a run.", is_required=True),
            _text("run_b", "The same of the other run.", is_required=True),
            _text("tolerance", "Accept relative deviations up to this share: 1%.", "--tolerance"),
        ),
        runs_code=False,
    ),
    Tool(
        name="query",
        title="Query recordings with SQL",
        text="Run one SQL SELECT (DuckDB) over the tables of recordings: collectives, modules, "
        "findings, memory and others. Use it for what no other tool answers, and for what "
        "`truncated` left out. Without sql it lists all tables and columns. A query cannot read "
        "anything else.",
        arguments=(
            _text("sql", "SELECT axis, sum(wire_bytes) FROM collectives GROUP BY 1"),
            _list("files", "Recordings; of several, tables have a column `recording`."),
        ),
        runs_code=False,
        without_arguments="--tables",
    ),
    Tool(
        name="show",
        title="Read a recording",
        text="The summary of recordings that exist already, optionally of some modules only. Use "
        "it to look again, or at ranks of a real run together, without executing anything.",
        arguments=(
            _FILES,
            _MODULE,
            _text("contract", "File with limits (shardscope.toml) to check.", "--contract"),
        ),
        runs_code=False,
    ),
    Tool(
        name="doctor",
        title="Check the installation",
        text="Versions of torch, shardscope and optional packages, and what works on this machine. "
        "Use it when another tool fails for a reason that has nothing to do with the program.",
        arguments=(),
        runs_code=False,
    ),
)
