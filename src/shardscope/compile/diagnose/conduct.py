"""Conducts an examination: who asks the worker, who searches, who writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from shardscope._torch.compiler_settings import read_settings
from shardscope._torch.preloading import FOR_INDUCTOR, FOR_SCRIPTS
from shardscope.comm.run import read_identity
from shardscope.compile.diagnose.at_bench import set_up, warm_up
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import Culprit
from shardscope.compile.diagnose.examine import Examination
from shardscope.compile.diagnose.folder import Folder
from shardscope.compile.diagnose.isolation.borrow import borrow_from_inductor
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.payload import pack
from shardscope.compile.diagnose.isolation.workers import Workers
from shardscope.compile.diagnose.judging.judge import resolve
from shardscope.compile.diagnose.progress import shown_progress
from shardscope.compile.diagnose.queries import Patience, Queries
from shardscope.compile.diagnose.records import make_recording
from shardscope.compile.diagnose.scribe import Scribe
from shardscope.compile.diagnose.subject import Subject
from shardscope.errors import CompileError
from shardscope.record import Diagnosis, Recording

__all__ = ["Means", "conduct"]


@final
@dataclass(frozen=True)
class Means:
    """What there is to examine with: a folder, processes, calls of the backend and seconds each."""

    folder: Folder
    workers: Workers
    nursery: Nursery | None
    budget: int
    compile_s: float


def conduct(subject: Subject, compiler: Compiler, means: Means) -> Recording:
    """What a compiler makes of a function, as the one diagnosis of a recording."""
    _check_can_be_sent(compiler)
    if "inductor" in compiler.name:
        borrow_from_inductor(means.folder.enclosure)
        if not torch.accelerator.is_available():
            means.workers.prepare(warm_up, name="vector instructions")
    _, world_size = read_identity()
    return make_recording(_examine(subject, compiler, means), world_size=world_size)


def _check_can_be_sent(compiler: Compiler) -> None:
    resolve(compiler)
    try:
        pack(compiler)
    except Exception as error:
        raise CompileError(
            f"the backend {compiler.name} cannot be sent to the process in which it is to run "
            f"({type(error).__name__}: {error}). Leave out of it, and of its options, what cannot "
            "be pickled: locks, files, generators."
        ) from error


def _examine(subject: Subject, compiler: Compiler, means: Means) -> Diagnosis:
    with shown_progress(means.budget) as teller:
        queries = Queries(means.workers, compiler, Patience(means.compile_s), teller.asked)
        culprit = Culprit(queries, compiler, teller, budget=means.budget)
        settings = read_settings()
        means.workers.prepare(set_up, settings, name="settings")
        scribe = Scribe(
            queries,
            compiler,
            means.folder,
            teller,
            compile_s=means.compile_s,
            settings=settings,
            nursery=means.nursery,
            imports=FOR_INDUCTOR if "inductor" in compiler.name else FOR_SCRIPTS,
        )
        try:
            return Examination(subject, compiler, queries, culprit, scribe, teller).run()
        finally:
            scribe.close()
