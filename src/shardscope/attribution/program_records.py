"""The records that describe a program: its run, mesh axes, modules and gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.mesh import describe_axes, meshes_of, root_mesh
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.module_records import Inventory
from shardscope.attribution.run_identity import describe_run, find_torch_gaps, read_identity
from shardscope.record import Axis, Gap, Module, Recording
from shardscope.world import current_world


@final
class ProgramRecords:
    """A recording's run, modules and gaps, for instruments that record no collectives."""

    def __init__(self, names: ModuleNames, *, instrument: str) -> None:
        self.rank, world_size = read_identity()
        self._gaps: dict[tuple[str, str], Gap] = {}
        axes = read_axes(names, self.report_gap)
        self._run = describe_run(self.rank, world_size, axes, instrument=instrument)
        for gap in find_torch_gaps():
            self.report_gap(gap.place, gap.fact)
        self._inventory = Inventory(names, self)
        # Before a module is called: during the call FSDP has gathered its parameters.
        self._modules: list[Module] = list(self._inventory.describe_new())

    def report_gap(self, place: str, fact: str) -> None:
        """Add a gap, unless the same gap was added before."""
        self._gaps.setdefault((place, fact), Gap(place=place, fact=fact, rank=self.rank))

    def recording(self) -> Recording:
        """A recording without collectives, findings or spans."""
        self._modules += self._inventory.describe_new()
        gaps = tuple(self._gaps.values())
        return Recording(
            run=self._run,
            groups=(),
            modules=tuple(self._modules),
            collectives=(),
            findings=(),
            gaps=gaps,
        )


def read_axes(
    names: ModuleNames,
    report_gap: Callable[[str, str], None],
    *,
    mesh: DeviceMesh | None = None,
    on_mesh: Callable[[DeviceMesh], None] | None = None,
) -> tuple[Axis, ...]:
    """The axes of the largest mesh in use: `mesh`, the simulated world's, or one of the models'.

    Args:
        names: The models, by the names of their modules.
        report_gap: Called with a place and a fact for each mesh that cannot be read.
        mesh: A mesh that the user named.
        on_mesh: Called with every mesh.
    """
    largest: DeviceMesh | None = None
    for candidate in _find_meshes(names, mesh, report_gap):
        try:
            if on_mesh is not None:
                on_mesh(candidate)
            root = root_mesh(candidate)
            if largest is None or root.size() > largest.size():
                largest = root
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            report_gap("mesh", f"a mesh could not be read ({error!r})")
    return () if largest is None else describe_axes(largest)


def _find_meshes(
    names: ModuleNames, mesh: DeviceMesh | None, report_gap: Callable[[str, str], None]
) -> list[DeviceMesh]:
    world = current_world()
    known = (mesh, None if world is None else world.mesh)
    meshes = [mesh for mesh in known if mesh is not None]
    try:
        for model in names.roots():
            meshes.extend(mesh for mesh in meshes_of(model) if mesh not in meshes)
    except Exception as error:  # noqa: BLE001 - tracing must not fail the run
        report_gap("mesh", f"the model's meshes could not be read ({error!r})")
    return meshes
