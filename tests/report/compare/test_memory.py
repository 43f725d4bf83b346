"""What a step needs: by kind, by module, and whether it fits."""

from __future__ import annotations

from compared_recordings import MIB, list_changes, make_memory
from sample_recordings import make_recording, make_run
from shardscope.record import MemoryKind
from shardscope.report.compare.changes import Area

HELD = MemoryKind.PARAMETERS
SAVED = MemoryKind.ACTIVATIONS


def test_memory_is_compared_by_kind_and_module():
    before = make_recording(memory=(make_memory((HELD, "a", MIB), (SAVED, "b", MIB)),))
    after = make_recording(
        memory=(make_memory((HELD, "a", MIB), (SAVED, "c", 3 * MIB), reserved_bytes=5 * MIB),)
    )
    assert list_changes(before, after, Area.MEMORY) == [
        "changed worse | peak: 2.00 MiB → 4.00 MiB",
        "changed worse | activations at the peak: 1.00 MiB → 3.00 MiB",
        "added worse | c: activations at the peak: – → 3.00 MiB",
        "gone better | b: activations at the peak: 1.00 MiB → –",
    ]


def test_values_missing_in_a_recording_are_no_change():
    sizes = {"first_peak_bytes": 4 * MIB, "needed_bytes": 9 * MIB, "device_bytes": 8 * MIB}
    before, after = (make_memory((HELD, "a", MIB), **fields) for fields in ({}, sizes))
    changes = list_changes(
        make_recording(memory=(before,)), make_recording(memory=(after,)), Area.MEMORY
    )
    assert changes == ["added worse | on a device of 8.00 MiB: – → does not fit"]


def test_a_step_that_no_longer_fits_is_worse():
    sizes = {"device_bytes": 8 * MIB}
    before = make_recording(memory=(make_memory(needed_bytes=7 * MIB, **sizes),))
    after = make_recording(memory=(make_memory(needed_bytes=9 * MIB, **sizes),))
    changes = list_changes(before, after, Area.MEMORY)
    assert "changed worse | on a device of 8.00 MiB: fits → does not fit" in changes


def test_ranks_with_equal_memory_changes_share_a_row():
    def profiles(*sizes: int):
        profiles_by_rank = [
            make_memory((HELD, "a", size), rank=rank) for rank, size in enumerate(sizes)
        ]
        ranks = tuple(range(len(sizes)))
        return make_recording(run=make_run(ranks=ranks), memory=tuple(profiles_by_rank))

    changes = list_changes(profiles(*[MIB] * 4), profiles(MIB, 2 * MIB, 2 * MIB, MIB), Area.MEMORY)
    assert "changed worse | peak, ranks 1-2: 1.00 MiB → 2.00 MiB" in changes
    changes = list_changes(profiles(*[MIB] * 4), profiles(*[2 * MIB] * 4), Area.MEMORY)
    assert "changed worse | peak: 1.00 MiB → 2.00 MiB" in changes
