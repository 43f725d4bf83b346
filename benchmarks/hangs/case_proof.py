"""Proves the cases on gloo: each wrong variant hangs where its condition holds, and only there.

    PYTHONPATH=src:. python -m benchmarks.hangs.case_proof             # all cases
    PYTHONPATH=src:. python -m benchmarks.hangs.case_proof fsdp ddp    # names that contain these

Nothing of shardscope is used. A wrong variant has to hang, or to fail in a collective; a corrected
one has to end under the same condition. Without the condition both have to end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.hangs.case import Case, list_cases, load_case
from benchmarks.hangs.ranks import Launch, Run, run


def prove(names: Sequence[str]) -> int:
    """Run all variants of the cases, and print each that does not do what it should; 1 if any."""
    num_wrong = 0
    for name in names:
        failures = list(prove_case(load_case(name)))
        num_wrong += bool(failures)
    print(f"{len(names)} cases, {num_wrong} not as recorded")
    return int(num_wrong > 0)


def prove_case(case: Case) -> Iterator[str]:
    """Run the variants of a case; yields what is not as its record says."""
    for variant in ("wrong", "corrected"):
        for has_condition in (True, False) if case.condition else (True,):
            expected, attempts = ("ended",), 1
            if variant == "wrong" and has_condition:
                expected = ("hang", "mismatch", case.proof.outcome or "hang")
                attempts = case.proof.attempts
            for _ in range(attempts):
                result = run_variant(case, variant, has_condition=has_condition)
                if result.outcome in expected:
                    break
            is_expected = result.outcome in expected
            title = f"{case.name} ({variant}"
            title += f", {case.condition})" if case.condition and has_condition else ")"
            print(f"{title}: {'' if is_expected else 'WRONG '}{describe(result)}", flush=True)
            if not is_expected:
                yield title
                for rank, output in enumerate(result.outputs):
                    for line in output.splitlines()[-12:]:
                        print(f"    rank {rank}: {line[:160]}")


def run_variant(case: Case, variant: str, *, has_condition: bool) -> Run:
    """Run a variant on gloo, where the condition of the case holds or not."""
    proof = case.proof
    environment = {**proof.environment, "HANG": variant}
    if has_condition:
        environment |= proof.condition
    launch = Launch(
        script=case.file,
        num_ranks=case.nproc,
        environment=environment,
        rank_environment=proof.ranks if has_condition else {},
        signal=proof.signal if has_condition else None,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in proof.files.items() if has_condition else ():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return run(launch, Path(folder))


def describe(result: Run) -> str:
    """How a run ended, and where its ranks were, in a line."""
    places = {} if result.outcome == "ended" else dict(enumerate(result.places))
    text = "; ".join(f"rank {rank} {place}" for rank, place in places.items())
    return f"{result.outcome}, {result.seconds:.1f} s{': ' + text if text else ''}"


if __name__ == "__main__":
    patterns = sys.argv[1:]
    chosen = [n for n in list_cases() if not patterns or any(p in n for p in patterns)]
    sys.exit(prove(chosen))
