"""Functions, and what torch.compile truly makes of them: the numbers are written by hand.

A graph is what goes to the backend. A break site is a line at which a trace stops, an event each
time that one does; that dynamo stops again in every caller on the way is no further event. A
skipped function is one that dynamo gave up. Ops are those that compute, inside higher-order ops
too. Lines that break end in `# break`. Where torch says something else, a comment tells what.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case"]


def X() -> torch.Tensor:
    return torch.ones(4)


@dataclass(frozen=True)
class Case:
    """A function, its calls and the true numbers; those not named are zero."""

    name: str
    make: Callable[[], Callable[..., Any]]
    calls: tuple[tuple[Any, ...], ...] = field(default_factory=lambda: ((X(),),))
    graphs: int = 0
    ops: int = 0
    sites: int = 0
    events: int = 0
    recompiles: int = 0
    skips: int = 0


CASES: list[Case] = []


def case(*calls: tuple[Any, ...], **numbers: int) -> Callable[[Any], Any]:
    """The function below is a case."""

    def add(function: Any) -> Any:
        given = {"calls": calls} if calls else {}
        CASES.append(Case(function.__name__, lambda: function, **given, **numbers))
        return function

    return add


def made(*calls: tuple[Any, ...], **numbers: int) -> Callable[[Any], Any]:
    """What the function below returns is a case."""

    def add(function: Any) -> Any:
        given = {"calls": calls} if calls else {}
        CASES.append(Case(function.__name__, function, **given, **numbers))
        return function

    return add


# Whole graphs


@case()  # torch: -1 breaks, for there are no graphs
def no_torch_ops(x: torch.Tensor) -> int:
    return 3


@case(graphs=1, ops=3)  # torch: 1 op, for it counts no methods
def straight(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).relu()


@made(graphs=1, ops=2)
def a_lambda() -> Any:
    return lambda x: x.sin() + 1


class Scaler:
    """Something that is called, and something with a method."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale


@made(graphs=1, ops=1)
def an_object_that_is_called() -> Any:
    return Scaler()


@made(graphs=1, ops=1)
def a_method() -> Any:
    return Scaler().shift


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.relu() * scale


@made(graphs=1, ops=2)
def a_partial() -> Any:
    return functools.partial(_scaled, scale=3.0)


@case(graphs=1, ops=1)  # the two nodes that switch gradients off and on compute nothing
def under_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


@case(graphs=1, ops=2)
def in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@case(graphs=1, ops=2)
def a_dict_of_outputs(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": x + 1, "b": x * 2}


@case((X(),), (X(),), graphs=1, ops=1)  # the second call finds the graph
def called_twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(graphs=1, ops=3)  # an exception that is caught is traced through; x + 1 is computed too
def caught_exception(x: torch.Tensor) -> torch.Tensor:
    try:
        y = x + 1
        raise ValueError("handled")
    except ValueError:
        y = x * 3
    return y.relu()


@case(graphs=1, ops=3)  # loops are unrolled
def a_loop_without_a_break(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x * 2
    return x


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for number in range(2):
        yield x + number


@case(graphs=1, ops=4)  # 2 of the generator, and 0 + x, x + x of the sum
def a_generator_inlined(x: torch.Tensor) -> torch.Tensor:
    return sum(_pieces(x))  # type: ignore[return-value]


@made(graphs=1, ops=2)
def a_shared_submodule() -> Any:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer)


@made(graphs=1, ops=2)  # the layer's, and the hook's
def a_module_with_a_hook() -> Any:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


# Higher-order ops


@case(graphs=1, ops=5)  # sum, >, cond, and one op in each branch
def a_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]


@case((X().requires_grad_(),), graphs=1, ops=4)  # checkpoint with 2 ops inside, relu
def a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).relu()  # type: ignore[no-any-return]


class Double(torch.autograd.Function):
    """With a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@case((X().requires_grad_(),), graphs=1, ops=4)  # apply, forward, backward, relu
def an_autograd_function(x: torch.Tensor) -> torch.Tensor:
    return Double.apply(x).relu()  # type: ignore[no-any-return, no-untyped-call]


# Breaks that are resumed


@case(graphs=1, ops=1, sites=1, events=1)  # torch: 0 breaks
def break_at_the_start(x: torch.Tensor) -> torch.Tensor:
    print(end="")  # break
    return x + 1


@case(graphs=1, ops=1, sites=1, events=1)  # torch: 0 breaks
def break_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print(end="")  # break
    return y


@case(graphs=2, ops=2, sites=1, events=1)
def break_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()  # break
    return y * 2


@case(sites=1, events=1)  # torch: -1 breaks
def break_without_a_graph(x: torch.Tensor) -> torch.Tensor:
    print(end="")  # break
    return x


@case(graphs=1, ops=1, sites=4, events=4)  # torch: 0 breaks
def four_breaks_around_a_graph(x: torch.Tensor) -> torch.Tensor:
    print(end="")  # break
    print(end="")  # break
    x = x + 1
    print(end="")  # break
    print(end="")  # break
    return x


@case(graphs=2, ops=2, sites=1, events=2)
def two_breaks_in_a_line(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print(end=""), print(end="")  # break
    return x * 2


@case(graphs=2, ops=4, sites=1, events=1)  # + 1, * 2 before; * 3, relu after
def break_in_with(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    with torch.no_grad():
        x = x * 2
        print(end="")  # break
        x = x * 3
    return x.relu()


@case(graphs=2, ops=3, sites=1, events=1)  # sum and > before, one branch after
def data_dependent_branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # break
        return x + 1
    return x - 1


@case(graphs=2, ops=2, sites=1, events=1)
def item(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # break


@case(graphs=2, ops=2, sites=1, events=1)  # > before, + after; the indexing is Python's
def masked(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0] + 1  # break


@torch.compiler.disable
def _disabled(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@case(graphs=2, ops=2, sites=1, events=1)  # what is in it is compiled by nobody
def disabled_function(x: torch.Tensor) -> torch.Tensor:
    return _disabled(x * 2) * 3  # break


def _inner(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print(end="")  # break
    return x * 2


def _middle(x: torch.Tensor) -> torch.Tensor:
    return _inner(x - 1).relu()


@case(graphs=6, ops=6, sites=1, events=1)  # torch: 5 breaks; it stops once, in each of three
def break_two_calls_down(x: torch.Tensor) -> torch.Tensor:
    return _middle(x.sin()).cos()


# The helper is compiled once, in two graphs, and found again; between the calls is nothing.
@case(graphs=2, ops=2, sites=1, events=3)
def break_in_a_helper_called_three_times(x: torch.Tensor) -> torch.Tensor:
    x = _inner(x)
    x = _inner(x)
    return _inner(x)


@case(graphs=3, ops=3, sites=1, events=1)  # + before; * in the closure; relu after
def break_in_a_closure(x: torch.Tensor) -> torch.Tensor:
    scale = 2

    def scaled(y: torch.Tensor) -> torch.Tensor:
        print(end="")  # break
        return y * scale

    return scaled(x + 1).relu()


class Talking(nn.Module):
    """A layer that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        print(end="")  # break
        return x.relu()


class Pair(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Talking()
        self.second = Talking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()  # type: ignore[no-any-return]


# linear and relu of the first, linear of the second again (its input requires a gradient), whose
# relu is found, and the sum.
@made(graphs=4, ops=4, sites=1, events=2, recompiles=1)
def a_module_that_breaks_twice() -> Any:
    return Pair()


# Skipped functions


@case(sites=1, events=1, skips=1)  # torch: nothing at all
def break_in_for(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + 1
        print(end="")  # break
    return x


@case(sites=1, events=1, skips=1)  # torch: nothing at all
def break_in_while(x: torch.Tensor) -> torch.Tensor:
    number = 0
    while number < 3:
        x = x + 1
        number += 1
        print(end="")  # break
    return x


@case(sites=1, events=1, skips=1)  # torch: nothing at all
def break_in_try(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    try:
        x = x * 2
        print(end="")  # break
    except ValueError:
        pass
    return x.relu()


# The loop is Python's; the helper is compiled in two graphs at its first call, and found again.
@case(graphs=2, ops=2, sites=1, events=1, skips=1)
def break_in_a_helper_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = _inner(x)
    return x


@case(graphs=1, ops=1, sites=2, events=2, skips=1)  # the rest of it is skipped
def a_loop_after_a_graph(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()  # break
    for _ in range(2):
        x = x + 1
        print(end="")  # break
    return x


@case(sites=1, events=1, skips=2)  # the loop, and then the generator, called by Python
def break_while_a_generator_runs(x: torch.Tensor) -> torch.Tensor:
    for piece in _pieces(x):
        x = x + piece
        print(end="")  # break
    return x


@case(skips=1)
def a_generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x + 1


@case(sites=1, events=1, skips=1)  # + 1 is lost with the function
def uncaught_exception(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    raise ValueError(y.shape)  # break


if sys.version_info < (3, 12):  # later, comprehensions are no functions of their own
    # The comprehension is skipped, as a loop; the helper makes two graphs, the sum one.
    @case(graphs=3, ops=5, sites=1, events=1, skips=1)
    def break_in_a_comprehension(x: torch.Tensor) -> torch.Tensor:
        return sum([_inner(x) for _ in range(3)])  # type: ignore[return-value]


# Recompilations


@case((torch.ones(4),), (torch.ones(5),), (torch.ones(6),), graphs=2, ops=2, recompiles=1)
def by_shape(x: torch.Tensor) -> torch.Tensor:  # the second is for any size; torch: 1 break
    return x * 2


@case((X(),), (X().double(),), graphs=2, ops=2, recompiles=1)
def by_dtype(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case((X(), 2), (X(), X()), graphs=2, ops=2, recompiles=1)
def by_type(x: torch.Tensor, other: Any) -> torch.Tensor:
    return x * other


@case((X(), 2), (X(), 3), (X(), 4), graphs=2, ops=2, recompiles=1)
def by_int(x: torch.Tensor, number: int) -> torch.Tensor:  # the second is for any integer
    return x * number


@case((X(), "a"), (X(), "b"), graphs=2, ops=2, recompiles=1)
def by_string(x: torch.Tensor, name: str) -> torch.Tensor:
    return x + 1 if name == "a" else x - 1


@case(*((X(), str(number)) for number in range(10)), graphs=8, ops=8, recompiles=7, skips=1)
def too_often(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * 2 if name else x


# Both pieces of it are compiled again.
@case((torch.ones(4),), (torch.ones(5),), graphs=4, ops=4, sites=1, events=2, recompiles=2)
def break_and_by_shape(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print(end="")  # break
    return x * 2
