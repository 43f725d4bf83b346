"""The tools of `shardscope mcp`: what they are for, their arguments, and the command of a call.

A tool is a command of the command line with fewer options. Its arguments are checked here, so that
a mistake gets a sentence; what they mean is checked by the command.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from shardscope.cli.verb import suggest
from shardscope.errors import ShardscopeError

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
}


class Argument(Struct, frozen=True, kw_only=True):
    """An argument of a tool; `option` is that of the command, empty for a positional argument.

    An array is given as several positional arguments, or by repeating the option.
    """

    name: str
    kind: str  # of JSON: a key of _TYPES
    text: str
    option: str = ""
    is_required: bool = False
    choices: tuple[str, ...] = ()

    def make_schema(self) -> dict[str, Any]:
        """The JSON Schema of a value."""
        schema: dict[str, Any] = {"type": self.kind, "description": self.text}
        if self.kind == "array":
            schema |= {"items": {"type": "string"}}
        return schema | ({"enum": list(self.choices)} if self.choices else {})

    def check(self, value: Any) -> None:
        """Raise ShardscopeError if a value has the wrong type or is not among the choices."""
        is_right = isinstance(value, _TYPES[self.kind])
        if isinstance(value, bool) and self.kind != "boolean":
            is_right = False
        if is_right and self.kind == "array":
            is_right = all(isinstance(item, str) for item in value)
        if not is_right:
            article = "an array of strings" if self.kind == "array" else f"of type {self.kind}"
            raise ShardscopeError(
                f"argument {self.name} must be {article}; got {value!r:.80}. {self.text}"
            )
        if self.kind == "number" and not 0 < value < math.inf:
            raise ShardscopeError(f"argument {self.name} must be above 0; got {value}. {self.text}")
        if self.choices and value not in self.choices:
            raise ShardscopeError(
                f"argument {self.name} must be one of {', '.join(self.choices)}; got {value!r:.80}."
            )
        # Nothing that a client sends may be read as an option.
        texts = value if isinstance(value, list) else [value]
        if not self.option and any(str(text).startswith("-") for text in texts):
            raise ShardscopeError(
                f"argument {self.name} must not begin with a dash; got {value!r:.80}. Options of "
                "the command are arguments of the tool."
            )

    def write(self, value: Any) -> list[str]:
        """The words of the command line for a value."""
        if self.kind == "boolean":
            return [self.option] if value else []
        values = [str(item) for item in (value if isinstance(value, list) else [value])]
        if not self.option:
            return values
        return [word for item in values for word in (self.option, item)]


class Tool(Struct, frozen=True, kw_only=True):
    """A command as a tool of agents.

    `runs_code` means that it executes the user's program. `takes_program` means that a program
    may be given instead of a target; the program of `run` is required. `without_arguments` is the
    option of a call that has no arguments.
    """

    name: str
    title: str
    text: str
    arguments: tuple[Argument, ...]
    runs_code: bool = True
    takes_program: bool = False
    without_arguments: str = ""

    def make_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        arguments = self._list_arguments()
        return {
            "type": "object",
            "properties": {argument.name: argument.make_schema() for argument in arguments},
            "required": [argument.name for argument in arguments if argument.is_required],
            "additionalProperties": False,
        }

    def make_command(self, values: Mapping[str, Any]) -> list[str]:
        """The words of the command line for these arguments; raises ShardscopeError."""
        arguments = {argument.name: argument for argument in self._list_arguments()}
        for name, value in values.items():
            if name not in arguments:
                near = suggest(name, list(arguments))
                raise ShardscopeError(
                    f"tool {self.name} has no argument {name!r:.80}.{near} It has "
                    f"{', '.join(arguments)}."
                )
            if value is not None:
                arguments[name].check(value)
        values = {name: value for name, value in values.items() if value is not None}
        for argument in arguments.values():
            if argument.is_required and not values.get(argument.name):
                raise ShardscopeError(
                    f"tool {self.name} needs the argument {argument.name}. {argument.text}"
                )
        self._check_program(values)
        written = {argument.name for argument in self.arguments}
        words = [self.name, "--json"]
        positional: list[str] = []
        for name in arguments:
            if name in values and name in written:
                place = words if arguments[name].option else positional
                place.extend(arguments[name].write(values[name]))
        if self.without_arguments and not positional:
            words.append(self.without_arguments)
        program = ["--", *values["program"]] if values.get("program") else []
        return [*words, *positional, *program]

    def _check_program(self, values: Mapping[str, Any]) -> None:
        if not self.takes_program or self.name == "run":
            return
        if bool(values.get("program")) == bool(values.get("target")):
            count = "both" if values.get("program") else "neither"
            raise ShardscopeError(
                f"tool {self.name} needs either target or program, and got {count}. target is a "
                "file that defines model() and batch(model); program is an unmodified training "
                'script with its arguments, such as ["train.py", "--lr", "3e-4"].'
            )

    def _list_arguments(self) -> Iterator[Argument]:
        yield from self.arguments
        if self.takes_program:
            yield PROGRAM if self.name != "run" else RUN_PROGRAM
        yield from COMMON


PROGRAM = Argument(
    name="program",
    kind="array",
    text="Instead of target: an unmodified training script and its arguments, such as "
    '["train.py", "--lr", "3e-4"], or ["-m", "package.train"].',
    option="--",
)
RUN_PROGRAM = Argument(
    name="program",
    kind="array",
    text='The training script and its arguments, such as ["train.py", "--lr", "3e-4"], or '
    '["-m", "package.train"]. Not torchrun: shardscope takes its place.',
    option="--",
    is_required=True,
)
COMMON = (
    Argument(
        name="cwd",
        kind="string",
        text="Folder to run in; all paths are relative to it. Default: the client's root, or the "
        "folder that the server was started in.",
        option="cwd",
    ),
    Argument(
        name="timeout_s",
        kind="number",
        text="Seconds after which the command is ended. Default: 900.",
        option="timeout",
    ),
)
"""What every tool takes. The server reads these; they are not options of a command, and their
`option` says only that they are not positional.
"""
