"""What an exploration keeps: failures in groups, each with its smallest example, and counts of everything else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvcover.sim.results.result import OUTCOMES
from kvcover.sim.results.verdict import PASS, Verdict, fail, inconclusive
from kvcover.sim.search.grid import sizes_of
from kvcover.sim.search.shrink import Draft


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


class Tallied(msgspec.Struct, omit_defaults=True):
    """What came of a chunk of runs, the first of which is number `at`. `digests` are 16 bytes a run, in order.

    `known` failures are no worse than the baseline. On a real tier, `skipped` says why drafts could not be run there and how
    many, `lost` counts those that it took and then could not run, and `varied` runs that differed from the model and agreed
    when they were run again.
    """

    at: int = 0
    runs: int = 0
    outcomes: dict[str, int] = {}
    groups: list[FailureGroup] = []
    digests: bytes = b""
    invalid: str = ""
    passed: int = 0
    known: int = 0
    skipped: dict[str, int] = {}
    lost: int = 0
    varied: int = 0

    def count(self, outcome: str) -> None:
        """One more run that ended so."""
        self.runs += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def run_digest(*parts: object) -> bytes:
    """16 bytes that stand for what came of one run."""
    return hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=16).digest()


def group_of(signature: Signature, name: str, draft: Draft) -> FailureGroup:
    """A group of one."""
    return FailureGroup(signature, _shape(draft), 1, _size(draft), name, draft)


_HEAD = re.compile(r"[^:]+:[^=@#,]*")


def _shape(draft: Mapping[str, Any]) -> tuple[str, ...]:
    """What a draft is about: the faults without their details, which way TP sizes go, who has several DP ranks."""
    heads = {match[0] for fault in draft.get("faults", ()) if (match := _HEAD.match(str(fault)))}
    (prefill, decode), dps = sizes_of(draft, "tp"), sizes_of(draft, "dp")
    way = "TP fan-in" if prefill > decode else "TP fan-out" if prefill < decode else "equal TP" if prefill > 1 else "TP 1"
    return (*sorted(heads), way, *(f"{name} DP" for name, dp in zip(("prefill", "decode"), dps, strict=True) if dp > 1))


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


def said(counts: Mapping[str, int]) -> str:
    """`3 vacuous, 1 idle`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


Groups = dict[tuple[Signature, tuple[str, ...]], FailureGroup]


def add_group(groups: Groups, group: FailureGroup) -> None:
    """Count a group in with those of its signature and shape."""
    known = groups.setdefault((group.signature, group.shape), group)
    if known is not group:
        known.merge(group)


class Exploration(msgspec.Struct):
    """Everything that was explored so far; `passed`, `known`, `skipped`, `lost` and `varied` as in Tallied.

    `ended` says why it ended before all was run, if it did. `unsettled` are runs on a real tier that it ended in the middle of.
    """

    runs: int = 0
    outcomes: dict[str, int] = {}
    groups: Groups = {}
    shrunk: bool = False
    invalid: str = ""
    seconds: float = 0.0
    ended: str = ""
    passed: int = 0
    known: int = 0
    skipped: dict[str, int] = {}
    lost: int = 0
    varied: int = 0
    unsettled: int = 0
    digests: dict[int, bytes] = {}

    def add(self, group: FailureGroup) -> None:
        """Count failures in."""
        add_group(self.groups, group)

    def count(self, report: Tallied) -> None:
        """Count what came of a chunk in."""
        self.runs += report.runs
        self.passed += report.passed
        self.known += report.known
        self.lost += report.lost
        self.varied += report.varied
        self.invalid = self.invalid or report.invalid
        self.digests[report.at] = report.digests
        for mine, more in ((self.outcomes, report.outcomes), (self.skipped, report.skipped)):
            for name, number in more.items():
                mine[name] = mine.get(name, 0) + number
        for group in report.groups:
            self.add(group)

    def verdict(self, whole: bool) -> Verdict:
        """One verdict of all that ran. Some of what seeds draw may be vacuous, idle, senseless or not for the tier, but not most.

        `whole`: each draft was asked for by itself, as those of a grid are, and so must have been run.
        """
        if self.failures:
            return fail(f"{self.failures} of {self.runs} runs are not as they should be")
        if self.lost:
            return inconclusive(f"{self.lost} of {self.runs} runs were begun and could not be run")
        if not self.runs:
            return inconclusive("nothing was run")
        if self.stopped:
            return inconclusive(f"{self.ended} before all was run that was asked for")
        left = self.outcomes.get("invalid", 0) + self.outcomes.get("skipped", 0)
        if whole and left:
            return inconclusive(f"{left} of {self.runs} were not run")
        if not self.passed:
            return inconclusive(f"none of {self.runs} runs passed, so nothing was put to the test")
        moot = self.moot
        if 2 * sum(moot.values()) > self.runs:
            return inconclusive(f"most of what was drawn showed nothing: {said(moot)} of {self.runs}")
        return PASS

    @property
    def moot(self) -> dict[str, int]:
        """Runs that showed nothing, neither good nor bad, by why."""
        drawn = {name: count for name in ("vacuous", "invalid", "skipped") if (count := self.outcomes.get(name, 0))}
        idle = self.runs - self.passed - self.known - self.failures - sum(drawn.values())
        return drawn | ({"idle": idle} if idle > 0 else {})

    @property
    def stopped(self) -> bool:
        """Whether it ended before all was run."""
        return bool(self.ended)

    @property
    def digest(self) -> str:
        """Over all results in their order, whoever ran them and wherever the cuts between chunks are."""
        whole = hashlib.blake2b(digest_size=16)
        for at in sorted(self.digests):
            whole.update(self.digests[at])
        return whole.hexdigest()

    @property
    def failures(self) -> int:
        return sum(group.count for group in self.groups.values())

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
