"""Exploration: scenarios and fault plans drawn from seeds, or every single fault of a small scenario; failures in groups.

A seed switches on a random subset of FEATURES (a swarm: what is left out matters as much as what is in), and each of
them draws its options from a random stream of its own. What comes out is plain scenario data, so every failure is a
file that `kvcover replay` runs again. The work is cut in chunks, and one digest over all results does not depend on
where the cuts are, nor on who ran them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import msgspec

from kvcover.sim.errors import InputError, short
from kvcover.sim.results.result import GOOD, OUTCOMES, Result
from kvcover.sim.results.verdict import PASS, Verdict, fail, inconclusive, judge_run
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.grid import faults_of, side_of, sizes_of
from kvcover.sim.search.shrink import Draft, shrink
from kvcover.sim.search.swarm import Swarm, swarm_of
from kvcover.sim.simulate import run_world

CHUNK_SEEDS = 50


# -- running -----------------------------------------------------------------------------------------------------


class SeedJob(msgspec.Struct, frozen=True, kw_only=True, tag="seeds"):
    """Some seeds of a swarm."""

    swarm: Swarm
    first: int
    count: int

    def drafts(self, fit: Callable[[Draft], None] = lambda draft: None) -> Iterator[tuple[str, Callable[[], Draft]]]:
        """A name for each draft, and how to make it; a tier's `fit` rounds what is drawn."""
        for seed in range(self.first, self.first + self.count):
            yield f"seed {seed}", functools.partial(self.swarm.draft, seed, fit)


class GridJob(msgspec.Struct, frozen=True, kw_only=True, tag="grid"):
    """A scenario alone, and with each of its faults."""

    draft: dict[str, Any]
    name: str

    def drafts(self) -> Iterator[tuple[str, Callable[[], Draft]]]:
        """As SeedJob.drafts."""
        yield f"{self.name}, no fault", lambda: self.draft
        try:
            faults = faults_of(self.draft)
        except InputError:
            return  # said by the draft alone
        planned = self.draft.get("faults", [])
        for fault in faults:
            yield f"{self.name}, {fault}", functools.partial(dict, self.draft, faults=[*planned, fault])


Work = SeedJob | GridJob


class Signature(msgspec.Struct, frozen=True, order=True):
    """What makes two failures the same: `release` says also whether decode ran another one."""

    outcome: str
    release: str
    mode: str
    kinds: tuple[str, ...]


class FailureGroup(msgspec.Struct):
    """Failures of one signature and shape: how many, and the smallest of them.

    Two bugs may look alike in what they find, so groups are told apart by shape too until they are shrunk or shown.
    """

    signature: Signature
    shape: tuple[str, ...]
    count: int
    size: tuple[int, ...]
    name: str
    draft: dict[str, Any]

    def merge(self, other: FailureGroup) -> None:
        """Count another group in, and keep the smaller example."""
        self.count += other.count
        if other.size < self.size:
            self.shape, self.size, self.name, self.draft = other.shape, other.size, other.name, other.draft


class Tallied(msgspec.Struct):
    """What came of a chunk, or of all of them. `digests` are 16 bytes a run, in order."""

    outcomes: dict[str, int] = {}
    passed: int = 0
    groups: list[FailureGroup] = []
    digests: bytes = b""
    invalid: str = ""


def signature_of(result: Result) -> Signature:
    """What a failure is told by."""
    kinds = sorted({finding.kind for finding in result.findings})
    if result.outcome in GOOD:
        kinds += [check.name for check in result.checks if check.verdict == "fail"]
    skew = "" if result.decode_release == result.release else " → other"
    return Signature(result.outcome, result.release + skew, result.mode, tuple(kinds))


def group_of(signature: Signature, name: str, draft: Draft) -> FailureGroup:
    """A group of one."""
    return FailureGroup(signature, _shape(draft), 1, _size(draft), name, draft)


_HEAD = re.compile(r"[^:]+:[^=@#,]*")


def _shape(draft: Mapping[str, Any]) -> tuple[str, ...]:
    """What a draft is about: the faults without their details, which way TP sizes go, who has several DP ranks."""
    heads = {match[0] for fault in draft.get("faults", ()) if (match := _HEAD.match(str(fault)))}
    (prefill, decode), dps = sizes_of(draft, "tp"), sizes_of(draft, "dp")
    way = "fan-in" if prefill > decode else "fan-out" if prefill < decode else "equal" if prefill > 1 else "single"
    return (*sorted(heads), way, *(f"{name}.dp" for name, dp in zip(("prefill", "decode"), dps, strict=True) if dp > 1))


def _size(draft: Mapping[str, Any]) -> tuple[int, ...]:
    """How much there is to read in a draft; ties go to the lower seed."""
    (ptp, dtp), (pdp, ddp) = sizes_of(draft, "tp"), sizes_of(draft, "dp")
    requests = draft.get("requests", 1)
    return (
        len(draft.get("faults", ())) + len(draft.get("overrides", ())),
        requests if isinstance(requests, int) else len(requests),
        ptp * pdp + dtp * ddp,
        len(json.dumps(draft)),
        draft.get("seed", 0),
    )


class _Ran(NamedTuple):
    """What came of one draft: `signature` if it is a failure."""

    outcome: str
    digest: str
    signature: Signature | None = None
    passed: bool = False


def _run_one(draft: Draft) -> _Ran:
    """Run one draft on the model; raises InputError if it makes no sense."""
    try:
        scenario = msgspec.convert(draft, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise InputError("draft", str(error)) from None
    try:
        result = run_world(resolve(scenario))[0]
    except InputError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} at {where.name}"
        return _Ran("error", kind, Signature("error", scenario.release, scenario.mode, (kind,)))
    verdict = judge_run(result)
    signature = signature_of(result) if verdict.status == "fail" else None
    return _Ran(result.outcome, result.digest or "", signature, verdict.passed)


def work(job: bytes) -> bytes:
    """Run a job in whatever process this is; both sides are msgpack, so that little travels."""
    report = Tallied()
    groups: Groups = {}
    digests = []
    for name, make in msgspec.msgpack.decode(job, type=Work).drafts():
        try:
            draft = make()
            ran = _run_one(draft)
        except InputError as error:
            ran = _Ran("invalid", str(error))
            report.invalid = report.invalid or f"{name}: {error}"
        report.outcomes[ran.outcome] = report.outcomes.get(ran.outcome, 0) + 1
        report.passed += ran.passed
        digests.append(hashlib.blake2b(f"{ran.outcome} {ran.signature} {ran.digest}".encode(), digest_size=16).digest())
        if ran.signature is not None:
            _add(groups, group_of(ran.signature, name, draft))
    report.groups, report.digests = list(groups.values()), b"".join(digests)
    return msgspec.msgpack.encode(report)


Groups = dict[tuple[Signature, tuple[str, ...]], FailureGroup]


def _add(groups: Groups, group: FailureGroup) -> None:
    known = groups.setdefault((group.signature, group.shape), group)
    if known is not group:
        known.merge(group)


class Exploration(msgspec.Struct):
    """Everything that was explored so far."""

    runs: int = 0
    passed: int = 0
    outcomes: dict[str, int] = {}
    groups: Groups = {}
    shrunk: bool = False
    invalid: str = ""
    digest: str = ""
    seconds: float = 0.0
    stopped: bool = False
    skipped: dict[str, int] = {}
    """On a real tier: why drafts could not be run there, and how many."""
    lost: int = 0
    """On a real tier: drafts that it took and then could not run, counted as skipped too."""
    varied: int = 0
    """On a real tier: runs that differed from the model, and agreed when they were run again."""

    def add(self, group: FailureGroup) -> None:
        """Count failures in."""
        _add(self.groups, group)

    @property
    def failures(self) -> int:
        return sum(group.count for group in self.groups.values())

    def verdict(self, whole: bool) -> Verdict:
        """One verdict of all that ran. What a seed draws may be vacuous, idle, senseless or not for the tier: nobody asked for it.

        `whole`: each draft was asked for, as those of a grid are, and so must have been run.
        """
        if self.failures:
            return fail(f"{self.failures} of {self.runs} runs are not as they should be")
        if self.lost:
            return inconclusive(f"{self.lost} of {self.runs} runs were begun and could not be run")
        if not self.runs:
            return inconclusive("nothing was run")
        left = self.outcomes.get("invalid", 0) + self.outcomes.get("skipped", 0)
        if whole and (left or self.stopped):
            return inconclusive(
                "the budget ended before the whole grid was run" if self.stopped else f"{left} of {self.runs} were not run"
            )
        return PASS if self.passed else inconclusive(f"none of {self.runs} runs passed, so nothing was put to the test")

    def ranked(self) -> list[FailureGroup]:
        """Groups, the worst outcome first, the commonest of an outcome first; by signature alone unless they are shrunk."""
        groups = self.groups
        if not self.shrunk:
            groups = {}
            for group in self.groups.values():
                alone = groups.setdefault((group.signature, ()), msgspec.structs.replace(group, count=0))
                alone.merge(group)
        order = {outcome: -rank for rank, outcome in enumerate((*OUTCOMES, "error", "differs"))}
        return sorted(groups.values(), key=lambda g: (order[g.signature.outcome], -g.count, g.signature, g.shape))


def seed_jobs(swarm: Swarm, first: int, count: int, chunk: int = CHUNK_SEEDS) -> Iterator[SeedJob]:
    """All seeds, in chunks."""
    for start in range(first, first + count, chunk):
        yield SeedJob(swarm=swarm, first=start, count=min(chunk, first + count - start))


def grid_jobs(data: Mapping[str, Any], pairs: Iterable[tuple[int, int]], modes: Iterable[str]) -> Iterator[GridJob]:
    """One job a mode and pairing of TP sizes."""
    sizes = list(pairs)
    for mode in modes:
        for prefill, decode in sizes:
            draft = copy.deepcopy(dict(data)) | {"mode": mode}
            side_of(draft, "prefill")["tp"], side_of(draft, "decode")["tp"] = prefill, decode
            yield GridJob(draft=draft, name=f"{mode} P{prefill}→D{decode}")


def run_jobs(
    jobs: Iterable[Work],
    executor: Executor | None = None,
    in_flight: int = 1,
    budget_s: float = math.inf,
    tick: Callable[[Exploration], None] = lambda summary: None,
) -> Exploration:
    """Run all jobs, or those that begin within the budget; the summary depends only on which jobs have run."""
    started, digest, summary = time.perf_counter(), hashlib.blake2b(digest_size=16), Exploration()
    for encoded in _results(jobs, executor, in_flight, started + budget_s, summary):
        report = msgspec.msgpack.decode(encoded, type=Tallied)
        digest.update(report.digests)
        summary.runs += len(report.digests) // 16
        summary.invalid = summary.invalid or report.invalid
        for outcome, count in report.outcomes.items():
            summary.outcomes[outcome] = summary.outcomes.get(outcome, 0) + count
        summary.passed += report.passed
        for group in report.groups:
            summary.add(group)
        summary.seconds = time.perf_counter() - started
        tick(summary)
    summary.digest = digest.hexdigest()
    return summary


def _results(
    jobs: Iterable[Work], executor: Executor | None, in_flight: int, deadline: float, summary: Exploration
) -> Iterator[bytes]:
    """What `work` makes of each job, in their order; with an executor, a few at a time are ahead."""
    waiting: deque[Future[bytes]] = deque()
    for job in jobs:
        if time.perf_counter() > deadline:
            summary.stopped = True
            break
        encoded = msgspec.msgpack.encode(job)
        if executor is None:
            yield work(encoded)
            continue
        waiting.append(executor.submit(work, encoded))
        if len(waiting) > in_flight:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def refuse_nonsense(summary: Exploration) -> None:
    """Raise InputError if there were runs, and none of them made sense."""
    if 0 < summary.runs == summary.outcomes.get("invalid", 0):
        raise InputError("explore", f"no scenario makes sense ({summary.invalid})", "pin less")


def explore(
    seeds: int = 1000,
    *,
    first: int = 0,
    pins: Mapping[str, Any] | None = None,
    features: Sequence[str] = (),
    full: bool = False,
    faults: bool = True,
    budget_s: float = math.inf,
    shrinks: bool = False,
    executor: Executor | None = None,
) -> Exploration:
    """Draw scenarios and faults from seeds, run each on the model, and group what failed: `ranked()` of what is returned.

    `pins` are fields that are as given, whatever a seed draws; `features` draws these only, `full` the rare ones as well, and
    without `faults` there are none. Nothing begins after `budget_s` seconds. `shrinks` reduces each group's example to the
    smallest that finds the same; `build` makes a scenario of it. An executor shares the work out, and changes no result.
    Raises InputError for pins and features that make no sense.

    >>> found = explore(20, pins={"release": "0.26.0", "mode": "write", "model": "layers=1,mla=8"}, features=["tp"])
    >>> worst = found.ranked()[0]
    >>> "wrong-peer" in worst.signature.kinds
    True
    >>> run(build(worst.draft)).outcome
    'corrupt'
    """
    for place, number, least, most in (("seeds", seeds, 1, 10**9), ("first", first, 0, 2**62)):
        if not (isinstance(number, int) and least <= number <= most):
            raise InputError(place, f"{short(number)} is wrong", f"use {least} to {most}")
    if not budget_s >= 0:
        raise InputError("budget_s", f"{short(budget_s)} is no number of seconds", "use a number such as 60")
    swarm = swarm_of(pins or {}, features, full, faults)
    summary = run_jobs(seed_jobs(swarm, first, seeds), executor, _AHEAD, budget_s)
    refuse_nonsense(summary)
    if shrinks:
        shrink_groups(summary, executor)
    return summary


_AHEAD = 64  # jobs that wait for an executor's workers, however many it has


# -- what is kept of a failure -----------------------------------------------------------------------------------


def shrink_groups(summary: Exploration, executor: Executor | None = None) -> None:
    """Shrink every example; groups whose examples are now of one signature and shape become one."""
    encoded = [msgspec.msgpack.encode(group) for group in summary.groups.values()]
    summary.groups, summary.shrunk = {}, True
    for small in (map if executor is None else executor.map)(_shrink_one, encoded):
        summary.add(msgspec.msgpack.decode(small, type=FailureGroup))


def _shrink_one(encoded: bytes) -> bytes:
    group = msgspec.msgpack.decode(encoded, type=FailureGroup)
    draft = shrink(group.draft)
    small = group_of(_run_one(draft).signature or group.signature, group.name, draft)
    small.count = group.count
    return msgspec.msgpack.encode(small)
