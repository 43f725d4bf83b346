"""Today's numbers as a contract: the recording satisfies it, and identical layers share a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.contract import (
    BreachKind,
    Contract,
    Figure,
    Limit,
    check,
    read_contract,
    record_contract,
    write_contract,
)
from shardscope.contract.record import Grain
from shardscope.errors import ContractError
from shardscope.record import Collective, Gap, Module, Phase, RankSpan, Recording


def said(*owners: str | None, size: int = 4096) -> tuple[Collective, ...]:
    return tuple(
        samples.make_collective(order=order, owner=owner, input_bytes=size, axis="tp")
        for order, owner in enumerate(owners)
    )


def patterns(contract: Contract, figure: Figure = Figure.COUNT) -> dict[str, tuple[object, object]]:
    return {
        limit.module: (limit.least, limit.most)
        for limit in contract.limits
        if limit.module is not None and limit.figure is figure
    }


@pytest.mark.parametrize("by", ["module", "axis", "total"])
def test_a_recording_keeps_the_contract_that_is_made_of_it_and_a_file_keeps_it_too(
    any_recording: Recording, by: Grain, tmp_path: Path
) -> None:
    contract = record_contract(any_recording, by=by)
    assert check(contract, any_recording) == ()
    path = write_contract(contract, tmp_path / "shardscope.toml")
    assert read_contract(path) == contract


def test_one_collective_more_breaks_it_and_is_named(llama: Recording) -> None:
    contract = record_contract(llama)
    new = samples.make_collective(order=999, axis="tp", owner="layers.7.attention", wire_bytes=1)
    grown = replace(llama, collectives=(*llama.collectives, new))
    violations = check(contract, grown)
    assert {violation.kind for violation in violations} == {BreachKind.TOO_MUCH}
    assert {violation.evidence[0].module for violation in violations} == {"layers.7.attention"}


def test_one_collective_less_breaks_it(llama: Recording) -> None:
    contract = record_contract(llama)
    gone = next(
        collective
        for collective in llama.collectives
        if collective.owner == "layers.7.attention.wo"
    )
    fewer = tuple(collective for collective in llama.collectives if collective is not gone)
    violations = check(contract, replace(llama, collectives=fewer))
    assert {violation.kind for violation in violations} == {BreachKind.TOO_LITTLE}
    assert ("layers.7.attention.wo",) in [violation.modules for violation in violations]


def test_identical_layers_share_a_pattern(llama: Recording) -> None:
    found = patterns(record_contract(llama))
    assert list(found) == [
        "",
        "layers.*",
        "layers.*.attention",
        "layers.*.attention.wo",
        "layers.*.feed_forward",
        "layers.*.feed_forward.w2",
    ]
    assert found["layers.*.attention"] == (1, 1)


def test_a_layer_that_differs_stands_alone_and_its_neighbours_in_a_range() -> None:
    owners = [f"layers.{n}.attn" for n in (0, 1, 2, 3, 3, 4, 5)]
    found = patterns(record_contract(samples.make_recording(said(*owners))))
    assert found == {
        "layers.[0-2].attn": (1, 1),
        "layers.3.attn": (2, 2),
        "layers.[4-5].attn": (1, 1),
    }


def test_stacks_within_stacks_fold_in_both_numbers() -> None:
    owners = [f"layers.{n}.experts.{m}" for n in (0, 1, 2) for m in (0, 1)]
    assert patterns(record_contract(samples.make_recording(said(*owners)))) == {
        "layers.*.experts.*": (1, 1)
    }
    owners.append("layers.2.experts.1")
    assert patterns(record_contract(samples.make_recording(said(*owners)))) == {
        "layers.[0-1].experts.*": (1, 1),
        "layers.2.experts.0": (1, 1),
        "layers.2.experts.1": (2, 2),
    }


def test_a_star_never_matches_a_module_with_other_figures() -> None:
    modules = tuple(
        Module(name=f"layers.{name}", type="", ranks=(RankSpan(0),)) for name in ("0", "1", "norm")
    )
    recording = samples.make_recording(said("layers.0", "layers.1"), modules=modules)
    assert patterns(record_contract(recording)) == {"layers.[0-1]": (1, 1)}


@pytest.mark.parametrize("name", ["a*", "a[0-9]", "?", "[!a]", "**", "layers.01"])
def test_names_that_look_like_patterns_match_only_themselves(name: str) -> None:
    others = ("ab", "a5", "x", "bb", "layers.1")
    recording = samples.make_recording(said(name, name, *others))
    contract = record_contract(recording)
    assert check(contract, recording) == ()
    limits = [limit for limit in contract.limits if limit.module and limit.most == 2]
    assert [limit.figure for limit in limits] == [Figure.COUNT]


def test_counts_are_exact_and_bytes_may_be_less() -> None:
    contract = record_contract(samples.make_recording(said("a")))
    assert patterns(contract) == {"a": (1, 1)}
    assert patterns(contract, Figure.BYTES) == {"a": (None, 4096)}


def test_where_ranks_differ_a_count_has_a_least_and_a_most() -> None:
    calls = tuple(
        samples.make_collective(rank=rank, order=order, owner="a")
        for rank in (0, 1)
        for order in range(rank + 1)
    )
    contract = record_contract(samples.make_recording(calls), by="total")
    (count,) = [
        limit for limit in contract.limits if limit.figure is Figure.COUNT and not limit.causes
    ]
    assert (count.least, count.most) == (1, 2)


def test_what_belongs_to_no_module_is_limited_by_axis(llama: Recording) -> None:
    homeless = [
        limit for limit in record_contract(llama).limits if limit.module is None and limit.kinds
    ]
    assert {limit.phases for limit in homeless} == {(Phase.OPTIMIZER,)}


def test_slack_gives_bytes_and_memory_room_and_counts_none() -> None:
    holdings = samples.make_holdings()
    recording = samples.make_recording(said("a", size=100 * 1024**2))
    contract = record_contract(recording, holdings, slack=0.05)
    assert patterns(contract) == {"a": (1, 1)}
    assert patterns(contract, Figure.BYTES) == {"a": (None, 105 * 1024**2)}
    (memory,) = [limit.most for limit in contract.limits if limit.figure is Figure.PEAK_MEMORY]
    assert memory == 1365
    with pytest.raises(ContractError, match="not a fraction"):
        record_contract(recording, slack=-1)


def test_a_run_that_lost_records_makes_no_contract() -> None:
    lossy = samples.make_recording(gaps=(Gap(place="stream", fact="cut", is_loss=True),))
    with pytest.raises(ContractError, match="were lost"):
        record_contract(lossy)


def test_user_limits_are_updated_and_removed_if_they_match_nothing() -> None:
    def make(figure: Figure = Figure.COUNT, **facts: object) -> Limit:
        return Limit(figure=figure, **facts)  # type: ignore[arg-type]

    previous = Contract((
        make(Figure.PEAK_MEMORY, most=5),
        make(module="**.attn", most=7),
        make(module="layers.*", least=7),
        make(module="gone.*", most=7),
        make(axes=("pp",), most=7),
        make(Figure.WIRE_BYTES, least=9, most=9),
    ))  # fmt: skip
    owners = ("layers.0.attn", "layers.1.attn", "layers.1.attn")
    recording = samples.make_recording(said(*owners))
    contract = record_contract(recording, by="total", previous=previous)
    assert contract.limits[0] == previous.limits[0]  # memory was not recorded
    kept = [(limit.module, limit.least, limit.most) for limit in contract.limits if limit.module]
    assert kept == [("**.attn", None, 2), ("layers.*", 1, None)]
    (wire,) = [limit for limit in contract.limits if limit.figure is Figure.WIRE_BYTES]
    assert (wire.least, wire.most) == (3 * 7168, 3 * 7168)
    assert not [limit for limit in contract.limits if limit.axes]
    assert check(contract, recording, samples.make_holdings())[0].limit == previous.limits[0]


def test_a_contract_of_thousands_of_modules_is_made_without_comparing_all_with_all() -> None:
    owners = [f"layers.{n}.experts.{m}" for n in range(40) for m in range(50)]
    recording = samples.make_recording(said(*owners))
    contract = record_contract(recording)
    assert patterns(contract) == {"layers.*.experts.*": (1, 1)}
