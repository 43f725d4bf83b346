"""Verdicts against two real gloo ranks that dispatch every op of three models on real data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dispatch_oracle
from coverage_models import MODELS
from rank_processes import run_ranks
from shardscope import coverage
from shardscope.record import OpVerdict

TIMEOUT_S = 200
# What the oracle can see of each verdict.
SEEN = {
    OpVerdict.LOCAL: ("free",),
    OpVerdict.SHARDED: ("free",),
    OpVerdict.DECOMPOSED: ("free",),
    OpVerdict.REDISTRIBUTED: ("moves",),
    OpVerdict.REPLICATED: ("moves", "whole"),
    OpVerdict.MISSING: ("raises",),
    OpVerdict.WRONG: ("wrong",),
}
# DTensor 2.11 takes minutes over batch statistics, for which it has no rule, and gloo does not
# survive its convolutions. Ops of a Llama are those of GPT-2, and of a ViT those of both others.
NAMES = ["gpt2", "moe", *(["resnet"] if torch.__version__ >= (2, 13) else [])]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two real ranks saw of every op of every model."""
    out = tmp_path_factory.mktemp("oracle") / "verdicts.json"
    program = Path(dispatch_oracle.__file__)
    ended = run_ranks(2, program, str(out), *NAMES, timeout_s=TIMEOUT_S)
    assert out.exists(), "\n".join(printed for _, printed in ended)[-3000:]
    return json.loads(out.read_text())


def test_every_verdict_is_what_real_ranks_see(oracle: dict[str, dict[str, str]]) -> None:
    """All models in one test, so that only one worker of the tests starts the ranks."""
    disagreements = {}
    for name in NAMES:
        torch.manual_seed(0)
        model, args = MODELS[name]()
        (found,) = coverage(model, *args, levels=["exported"]).coverage
        verdicts = {one.op: one.verdict for one in found.ops}
        fatal = {op for model_name, op in dispatch_oracle.FATAL if model_name == name}
        assert set(verdicts) - fatal == set(oracle[name])
        disagreements |= {
            (name, op): (str(verdicts[op]), seen)
            for op, seen in oracle[name].items()
            if seen not in SEEN[verdicts[op]]
        }
    assert disagreements == {}
