"""Scores `shardscope.parity` on mutations of the collectives of correct programs.

    PYTHONPATH=src:. python benchmarks/silent_mutations.py                 # a sample, seeded
    PYTHONPATH=src:. python benchmarks/silent_mutations.py --number 300 --details wrong
    PYTHONPATH=src:. python benchmarks/silent_mutations.py megatron        # of these programs

A call of a collective is dropped, doubled, scaled, given another group or another dim. Mutations
that gloo shows to change numbers in float64, without an exception, count. Found: parity reports an
error. Location: the first finding names the module that runs the call or holds the parameters, the
line of the call or of its callers, the function of the call unless that is an entire step, or, of a
call outside modules, what it computes. Cause: the one of the kind of the mutation.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.silent import mutations
from benchmarks.silent.correct import PROGRAMS
from benchmarks.silent.mutation_proof import Mutation, Outcome, measure

BATCH = 40  # mutations in a process
CAUSES = {
    "drop": {"missing_reduction"},
    "double": {"double_reduction"},
    "scale": {"scaled", "double_reduction"},
    "group": {"wrong_group"},
    "dim": {"wrong_dim", "permuted", "wrong_slice"},
}
# Of calls outside modules: what else is right, by function.
OUTSIDE: dict[str, tuple[set[str], set[str]]] = {  # subjects, causes
    "total_norm": ({"the gradient norm", "gradient clipping"}, {"norm", "clipping"}),
    "sum_over_data": ({"the loss", "all gradients"}, {"scaled", "out_of_sync"}),
    "rank_step": ({"the loss", "all gradients"}, {"scaled", "out_of_sync"}),
    "penalties": ({"the loss", "all gradients"}, {"scaled", "out_of_sync"}),
    "Pipeline.make_step": ({"the loss", "all gradients"}, {"scaled", "out_of_sync"}),
    "report_rank": (set(), {"out_of_sync"}),
    "Pipeline.report": (set(), {"out_of_sync"}),
    "Pipeline.run": (set(), {"out_of_sync"}),
    "VocabularyCrossEntropy.forward": ({"the loss", "returned", "returned['loss']"}, set()),
    "DDP.parallelize": ({"all gradients"}, set()),
    "FSDP.shard": ({"all gradients"}, set()),
    "ExpertParallel.parallelize": ({"all gradients"}, set()),
    "Pipeline.parallelize": ({"all gradients"}, set()),
}


def main() -> int:
    """Prove and score a sample of mutations, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--number", type=int, default=200, help="of mutations to sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--details", choices=("none", "wrong", "all"), default="none")
    parser.add_argument("--proofs", type=Path, help="a file that keeps what gloo has shown")
    parser.add_argument("--known", action="store_true", help="only what --proofs has already")
    parser.add_argument("--results", type=Path, help="a file for the results, as JSON lines")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        for fields in json.loads(arguments.run):
            print(json.dumps(check(Mutation(**fields))), flush=True)
        return 0
    proofs = Proofs(arguments.proofs)
    if arguments.known:
        chosen = [mutation for mutation in proofs.measure([]) if mutation.site >= 0]
    else:
        chosen = sample(proofs, arguments.pattern, arguments.number, arguments.seed)
    outcomes = proofs.measure(chosen)
    effective = [mutation for mutation in chosen if outcomes[mutation].is_effective]
    print(f"{len(chosen)} mutations, {len(effective)} of them change numbers silently", flush=True)
    results = []
    for result in run_all(effective):
        mutation = Mutation(**result["mutation"])
        result |= score(mutation, result, outcomes[mutation])
        results.append(result)
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                print(json.dumps(result), file=file)
        print_result(result, arguments.details)
    print_table(results)
    return 0


class Proofs:
    """What gloo has shown, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Mutation, Outcome] = {}
        if path is not None and path.exists():
            self._known = pickle.loads(path.read_bytes())

    def measure(self, jobs: Sequence[Mutation]) -> Mapping[Mutation, Outcome]:
        """The outcomes of these mutations."""
        new = [job for job in jobs if job not in self._known]
        for outcomes in measure(new):
            self._known |= outcomes
            if self._path is not None:
                self._path.write_bytes(pickle.dumps(self._known))
        return self._known


def sample(proofs: Proofs, pattern: str, number: int, seed: int) -> list[Mutation]:
    """Mutations of all sites and kinds in turn, each in another program than before if possible."""
    names = [name for name in PROGRAMS if pattern in name and PROGRAMS[name].precision is None]
    names = [name for name in names if not PROGRAMS[name].family.is_random]
    outcomes = proofs.measure([Mutation(name, -1, "mark") for name in names])
    sites, generator = mutations.list_sites(), random.Random(seed)
    options: dict[tuple[int, str], list[str]] = {}
    for name in names:
        outcome = outcomes[Mutation(name, -1, "mark")]
        if outcome.failure or outcome.error > 1e-9:
            raise SystemExit(f"{name} is not right as it is: {outcome.failure or outcome.error}")
        num_axes = sum(size > 1 for size in PROGRAMS[name].layout.mesh.values())
        for site in outcome.sites:
            for kind in sites[site].kinds(num_axes):
                options.setdefault((site, kind), []).append(name)
    for programs in options.values():
        generator.shuffle(programs)
    keys = sorted(options)
    generator.shuffle(keys)
    chosen: list[Mutation] = []
    while len(chosen) < number and any(options.values()):
        for site, kind in keys:
            if options[site, kind] and len(chosen) < number:
                chosen.append(Mutation(options[site, kind].pop(), site, kind))
    return chosen


def check(mutation: Mutation) -> dict[str, Any]:
    """Run parity on a mutated program: its errors, or the failure, and the time."""
    from shardscope import parity

    warnings.simplefilter("ignore")
    program, start = PROGRAMS[mutation.program], time.perf_counter()
    result: dict[str, Any] = {"mutation": asdict(mutation)}

    def parallelize(model: Any, mesh: Any) -> Any:
        mutations.watch(model, mesh)
        return program.layout.parallelize(model, mesh)

    try:
        with mutations.mutated({mutations.list_sites()[mutation.site]: mutation.kind}):
            recording = parity(
                program.make_model(),
                program.layout.mesh,
                parallelize=parallelize,
                batches=program.make_batches(),
                train_step=program.train_step,
                parallel_train_step=program.rank_step,
                optimizer=program.make_trainer,
                batch_axes=program.layout.batch_axes,
                batch_dim=program.layout.batch_dim,
            )
        result["findings"] = [
            {
                "rule": finding.rule,
                "subject": finding.subject,
                "fact": finding.fact,
                "source": finding.source
                and (finding.source.file, finding.source.line, finding.source.text),
            }
            for finding in recording.findings
            if finding.severity == "error"
        ]
        result["gaps"] = [f"{gap.place}: {gap.fact}" for gap in recording.gaps]
    except Exception as error:  # noqa: BLE001 - a failure is a result
        result["failure"] = f"{type(error).__name__}: {error!s:.400}"
    result["seconds"] = time.perf_counter() - start
    return result


def run_all(chosen: Sequence[Mutation]) -> Iterator[dict[str, Any]]:
    """The results of all mutations, each batch of them in a process of its own."""
    for start in range(0, len(chosen), BATCH):
        batch = [asdict(mutation) for mutation in chosen[start : start + BATCH]]
        command = [sys.executable, __file__, "--run", json.dumps(batch)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)


def score(mutation: Mutation, result: Mapping[str, Any], outcome: Outcome) -> dict[str, bool]:
    """Whether a mutation is found, with the right location and cause."""
    findings = result.get("findings", ())
    if "failure" in result:  # refused with a sentence that says why
        is_refused = result["failure"].startswith(("CollectiveError", "RankError"))
        return {"found": is_refused, "location": False, "cause": False}
    if not findings:
        return {"found": False, "location": False, "cause": False}
    site, first = mutations.list_sites()[mutation.site], findings[0]
    subjects, causes = OUTSIDE.get(site.function, (set(), set()))
    cause = first["rule"].removeprefix("parity-").replace("-", "_")
    wanted = CAUSES[mutation.kind.partition(" ")[0]] | causes
    return {
        "found": True,
        "location": first["subject"] in subjects or is_at(first, site, outcome),
        "cause": cause in wanted,
    }


def is_at(finding: Mapping[str, Any], site: mutations.Site, outcome: Outcome) -> bool:
    """Whether a finding names the line, the module or the parameters of a call."""
    source = finding["source"]
    if source is not None and (Path(source[0]).name, source[1]) in outcome.lines:
        return True
    is_step = "step" in site.function or "parallelize" in site.function
    is_in_file = source is not None and Path(source[0]).stem == site.file
    if is_in_file and not is_step and source[1] in mutations.list_lines(site):
        return True
    owners = {name.rpartition(".")[0] for name in outcome.parameters}
    accepted = {*outcome.modules, *owners}
    if site.key:
        accepted |= {f"layers.{index}.{site.key}" for index in range(4)} | {site.key}
    if outcome.parameters and finding["subject"] == "all gradients":
        return True
    if site.callee == "fully_shard" and finding["subject"] not in ("the loss",):
        return True
    subjects = [subject.strip("` ") for subject in finding["subject"].split(",")]
    return any(
        fnmatch.fnmatchcase(module or "the model itself", subject)
        for subject in subjects
        for module in accepted
    )


def print_result(result: Mapping[str, Any], details: str) -> None:
    """Print a mutation and what parity says of it."""
    is_right = result["found"] and result["location"] and result["cause"]
    if details == "none" or (details == "wrong" and is_right):
        return
    mutation = result["mutation"]
    site = mutations.list_sites()[mutation["site"]]
    lacking = [name for name in ("found", "location", "cause") if not result[name]]
    print(f"{mutation['program']}  {mutation['kind']} {site.name} in {site.function}")
    print(f"    {'right' if not lacking else 'not ' + ', '.join(lacking)}", flush=True)
    for finding in result.get("findings", ())[:2]:
        print(f"    {finding['rule']} at {finding['subject']} {finding['source']}")
        print(f"        {finding['fact']}")
    if "failure" in result:
        print(f"    {result['failure']}")


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print what is found by kind and by parallelism."""
    if not results:
        return
    groups: dict[str, Counter[str]] = {}
    for result in results:
        mutation = result["mutation"]
        for key in (mutation["kind"].partition(" ")[0], _parallelism(mutation["program"]), "all"):
            counter = groups.setdefault(key, Counter())
            counter["all"] += 1
            for name in ("found", "location", "cause"):
                counter[name] += result[name]
    print(f"{'':24}{'all':>6}{'found':>8}{'location':>10}{'cause':>8}")
    for key in (*KINDS, *sorted(groups.keys() - {*KINDS, "all"}), "all"):
        if key in groups:
            counter = groups[key]
            cells = [
                f"{100 * counter[n] / counter['all']:.0f} %" for n in ("found", "location", "cause")
            ]
            print(f"{key:24}{counter['all']:6}{cells[0]:>8}{cells[1]:>10}{cells[2]:>8}")
    seconds = sorted(result["seconds"] for result in results)
    print(f"median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s")


KINDS = mutations.KINDS


def _parallelism(program: str) -> str:
    layout = PROGRAMS[program].layout
    return str(layout.name)


if __name__ == "__main__":
    sys.exit(main())
