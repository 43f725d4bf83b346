"""The command line: one file per command; each is imported only when it is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, final

import click

from shardscope._torch.logs import failed_ops_unlogged
from shardscope.cli.console import (
    buffer_torch_lines,
    explain_stdout,
    is_first,
    print_error,
    silence_stdout,
)
from shardscope.cli.json_result import start_json, writing_json
from shardscope.cli.verb import EXIT_CODES, check_command, write_examples
from shardscope.errors import ShardscopeError
from shardscope.record.text import sanitize_text
from shardscope.version import __version__

__all__ = ["main"]

_FAILED = 2  # exit code
_COMPLETION = "_SHARDSCOPE_COMPLETE"
_EXAMPLES = (
    "shardscope demo",
    "shardscope trace train.py --mesh dp=8,tp=4",
    "shardscope show train.shardscope.json.gz --by cause",
    "shardscope trace --help",
)
_VERBS = {
    "demo": "Simulate a training step of an 8B model on 1,024 ranks.",
    "init": "Write a target, a contract or files for CI for your model.",
    "run": "Run your training program, unmodified, as any rank of a simulated cluster.",
    "trace": "Record the collectives of a training step of your program.",
    "audit": "Show how your model is sharded, and what is wrong with its sharding.",
    "visualize": "Show which rank holds which slice of a parameter.",
    "memory": "Estimate the peak GPU memory of a step, and whether it fits.",
    "coverage": "Find which ops of a model can run sharded, and what blocks the others.",
    "parallelize": "Partition a model for a mesh according to a plan, and verify the result.",
    "parity": "Compare a parallel model with a single device: outputs, gradients, buffers.",
    "check": "Find out before launch whether the ranks of a program would hang.",
    "types": "Infer how every tensor of a parallel model is distributed: R, S(d), P, V.",
    "explain": "Count the graphs that torch.compile captures, and say what breaks them.",
    "diagnose": "Compare a compiled model with eager, and locate the op that differs.",
    "show": "Print a recording.",
    "report": "Save a recording as an HTML page that opens offline.",
    "serve": "Show a recording of any size in a browser, over a local server.",
    "tui": "Browse a recording in the terminal.",
    "diff": "Show what changed between two recordings; fail on regressions in CI.",
    "compare": "Find the first step, module and tensor whose values differ between two real runs.",
    "contract": "Check a program against limits on collectives, memory and more in CI.",
    "ci": "Check a branch: record its programs, check limits, compare with its base.",
    "hang": "Explain why a run hangs, from dumps, stacks, logs and streams of its ranks.",
    "merge": "Merge the recordings of a run's ranks, and compare the ranks.",
    "export": "Convert a recording for Perfetto, Chakra, TensorBoard, CI, Parquet or spreadsheets.",
    "query": "Run an SQL query on the tables of recordings.",
    "mcp": "Serve the commands to a coding agent as tools (Model Context Protocol).",
    "doctor": "Print versions, and try what works on this machine.",
    "completion": "Print a script that completes commands and options in your shell.",
}


@final
class _Verbs(click.Group):
    """Knows its commands by name, so that `--help` and `show` do not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        if _COMPLETION in os.environ:  # a shell asks at each press of Tab: without torch
            command = import_module("shardscope.cli.completion").load_command(cmd_name)
            assert command is None or isinstance(command, click.Command)
            return command
        # Most commands import torch, which may take seconds.
        show_progress = import_module("shardscope.cli.console").show_progress
        with show_progress(f"starting {cmd_name}", is_shown=is_first()):
            command = import_module(f"shardscope.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names, or suggest one."""
        start_json(ctx, args)
        check_command(self, ctx, args[0])
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print examples, what is saved under which name, and the exit codes."""
        write_examples(formatter, _EXAMPLES)
        with formatter.section("Files"):
            formatter.write_text(import_module("shardscope.cli.destination").FILES_HELP)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; every error ends in one line and an exit code."""
        with writing_json(ctx):
            return self._invoke_quietly(ctx)

    def _invoke_quietly(self, ctx: click.Context) -> Any:
        """Run a command, and drop torch's warnings if it fails."""
        if ctx.params.get("debug"):
            return self._invoke(ctx)
        # For torch's C++ code, which writes to standard error itself; read when torch is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with buffer_torch_lines() as lines:
            try:
                return self._invoke(ctx)
            except click.exceptions.Exit as end:
                if end.exit_code == _FAILED and (hint := lines.discard()):
                    click.echo(f"shardscope: {hint}", err=True)
                raise
            except click.ClickException as error:
                if hint := lines.discard():
                    vars(error).update(message=f"{error.message} ({hint.rstrip('.')})")
                raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if not _is_help(error):
                vars(error).update(message=sanitize_text(error.message))  # it may quote an argument
            raise
        except click.exceptions.Exit:
            raise
        except (KeyboardInterrupt, click.Abort):
            _end(ctx, "interrupted", _FAILED)
        except ShardscopeError as error:
            _end(ctx, str(error), error.exit_code, getattr(error, "example", ""))
        except Exception as error:  # noqa: BLE001 - the last resort of a command line
            fact = f"unexpected error ({type(error).__name__}: {error})"
            _end(
                ctx,
                f"{fact}. Run again with `shardscope --debug …` and report its output.",
                _FAILED,
            )

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Handle a stdout that cannot be written also for `--help`, which click prints itself."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            silence_stdout()
            print_error(explain_stdout(error.strerror or str(error)))
            sys.exit(_FAILED)


def _is_help(error: click.ClickException) -> bool:
    """Whether its message is our own help: a group was called without a command."""
    return type(error).__name__ == "NoArgsIsHelpError"  # which click before 8.2 does not have


def _end(ctx: click.Context, sentence: str, exit_code: int, example: str = "") -> None:
    """Print an error and exit; the sentence may quote untrusted text, `example` may not."""
    error = sys.exc_info()[1]
    if ctx.params.get("debug") and error is not None:
        import_module("shardscope.cli.console").print_traceback(error)
    print_error(sentence)
    if example:
        click.echo(f"\n{example}", err=True)
    ctx.exit(exit_code)


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="shardscope", message="%(prog)s %(version)s")
@click.option(
    "--debug",
    is_flag=True,
    help="Print the traceback of an error, and what torch prints before it.",
)
def main(debug: bool) -> None:
    """See what a PyTorch model does when it is compiled and sharded."""
    if not debug:
        click.get_current_context().with_resource(failed_ops_unlogged())
