"""The command line: one file per verb; each is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, final

import click

from shardscope._torch.logs import failed_ops_unlogged
from shardscope.cli.launch import is_first
from shardscope.cli.stdout import explain_stdout, silence_stdout
from shardscope.errors import ShardscopeError
from shardscope.report.names import make_inert
from shardscope.version import __version__

__all__ = ["main"]

_VERBS = {
    "demo": "Simulate a training step of an 8B model on 1,024 ranks, here and now.",
    "trace": "Record a training step of your own program.",
    "audit": "Show what each rank holds of your model, and what is wrong with its sharding.",
    "visualize": "Show which rank holds which slice of a parameter.",
    "memory": "Tell what a step needs of a GPU's memory, and whether it fits.",
    "coverage": "Find which ops of a model shard, and what blocks sharding first.",
    "parallelize": "Cut a model for a mesh as a plan says, and prove that it is still the same.",
    "parity": "Compare a parallel model with the single device: outputs, gradients, buffers.",
    "explain": "Tell how many graphs torch.compile makes of a model, and what breaks them.",
    "diagnose": "Find out whether a compiled model is right, and what is to blame if it is not.",
    "show": "Print a recording.",
    "report": "Draw a recording as an HTML page that opens offline.",
    "tui": "Walk through a recording in the terminal.",
    "diff": "Tell what changed from one recording to another; fail on what must not.",
    "contract": "Hold a program to limits on collectives, memory, graph breaks and more, in CI.",
    "merge": "Join the recordings of a run's ranks, and check that they agree.",
    "export": "Turn a recording into a trace, TensorBoard scalars, a table, JSON or Markdown.",
}


@final
class _Verbs(click.Group):
    """Knows its verbs by name, so that `--help` and `show` need not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        # Most verbs import torch, which may take longer than people wait in silence.
        show_progress = import_module("shardscope.cli.console").show_progress
        with show_progress(f"starting {cmd_name}", is_shown=is_first()):
            command = import_module(f"shardscope.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; whatever goes wrong ends in one line and an exit code."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error).update(message=make_inert(error.message))  # it may repeat an argument
            raise
        except click.exceptions.Exit:
            raise
        except (KeyboardInterrupt, click.Abort):
            _end(ctx, "interrupted", 2)
        except ShardscopeError as error:
            _end(ctx, str(error), error.exit_code, getattr(error, "example", ""))
        except Exception as error:  # noqa: BLE001 - the last resort of a command line
            fact = f"something unforeseen happened ({type(error).__name__}: {error})"
            _end(ctx, f"{fact}. Run `shardscope --debug …` again and report what it prints.", 2)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """The same for `--help` and `--version`, which click prints by itself."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            silence_stdout()
            click.echo(f"shardscope: {explain_stdout(error.strerror or str(error))}", err=True)
            sys.exit(2)


def _end(ctx: click.Context, sentence: str, exit_code: int, example: str = "") -> None:
    """`example` is our own text, on lines of its own; a sentence may hold a stranger's."""
    error = sys.exc_info()[1]
    if ctx.params.get("debug") and error is not None:
        import_module("shardscope.cli.console").print_traceback(error)
    click.echo(f"shardscope: {make_inert(sentence)}", err=True)
    if example:
        click.echo(f"\n{example}", err=True)
    ctx.exit(exit_code)


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a finding, 2 usage or input.",
)
@click.version_option(__version__, prog_name="shardscope", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """See what a PyTorch model does when it is compiled and sharded."""
    if not debug:
        click.get_current_context().with_resource(failed_ops_unlogged())
