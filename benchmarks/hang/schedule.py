"""The collectives of a training step on a mesh, as each rank issues them in order.

The step is that of a transformer with the axes that the mesh has: pipeline stages (pp) that send
activations, replicas (replicate) and shards (dp) of the data, tensor parallelism (tp), and a
gradient norm over all ranks.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

LAYERS = 2
T0_NS = 1_795_000_000_000_000_000


class Op(Struct, frozen=True):
    """A collective or transfer of a rank's program."""

    axis: str
    kind: str
    dtype: str = "bfloat16"
    elements: int = 1024
    reduce_op: str | None = None
    root: int | None = None  # global rank, of a broadcast
    peer: int | None = None  # global rank, of a send or receive
    line: int = 0
    module: str = ""
    phase: str = "forward"


class World(Struct, frozen=True):
    """The ranks of a mesh, the first axis outermost."""

    axes: dict[str, int]

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        place = {}
        for name, size in reversed(self.axes.items()):
            place[name] = rank % size
            rank //= size
        return place

    def rank_of(self, coordinate: dict[str, int]) -> int:
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + coordinate[name]
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of a rank's group along an axis; `world` is all of them."""
        if axis == "world":
            return tuple(range(self.size))
        place = self.coordinate(rank)
        return tuple(self.rank_of(place | {axis: index}) for index in range(self.axes[axis]))

    def neighbour(self, rank: int, axis: str, distance: int) -> int | None:
        place = self.coordinate(rank)
        index = place[axis] + distance
        return self.rank_of(place | {axis: index}) if 0 <= index < self.axes[axis] else None


def make_step(world: World, rank: int) -> list[Op]:
    """The collectives of a step of one rank."""
    ops: list[Op] = []
    before = world.neighbour(rank, "pp", -1) if "pp" in world.axes else None
    after = world.neighbour(rank, "pp", 1) if "pp" in world.axes else None
    if before is not None:
        ops.append(Op("pp", "recv", peer=before, line=30, phase="forward"))
    for layer in range(LAYERS):
        module = f"layers.{layer}"
        if "dp" in world.axes:
            ops.append(Op("dp", "all_gather", elements=4096 + layer, line=41, module=module))
        if "tp" in world.axes:
            ops.append(Op("tp", "all_gather", line=52, module=f"{module}.attention"))
            ops.append(Op("tp", "reduce_scatter", reduce_op="sum", line=53, module=f"{module}.mlp"))
    if after is not None:
        ops.append(Op("pp", "send", peer=after, line=60))
        ops.append(Op("pp", "recv", peer=after, line=70, phase="backward"))
    for layer in reversed(range(LAYERS)):
        module = f"layers.{layer}"
        if "tp" in world.axes:
            ops.append(
                Op("tp", "all_reduce", reduce_op="sum", line=82, module=module, phase="backward")
            )
        if "dp" in world.axes:
            ops.append(
                Op(
                    "dp", "reduce_scatter", "float32", 4096 + layer, "avg",
                    line=93, module=module, phase="backward",
                )
            )  # fmt: skip
    if before is not None:
        ops.append(Op("pp", "send", peer=before, line=99, phase="backward"))
    if "replicate" in world.axes:
        ops.append(
            Op("replicate", "all_reduce", "float32", 8192, "avg", line=110, phase="backward")
        )
    ops.append(Op("world", "all_reduce", "float32", 1, "sum", line=121, phase="optimizer"))
    ops.append(Op("world", "broadcast", "int64", 2, root=0, line=130, phase="optimizer"))
    return ops
