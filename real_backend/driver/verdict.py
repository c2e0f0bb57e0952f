"""From what a run's processes saw to coverage, sets and outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcover.real_backend.driver.engine import Engine, Tracked
from kvcover.real_backend.driver.processes import Child
from kvcover.real_backend.driver.reports import Coverage, Raised, RankReport, RequestResult, TrialResult
from kvcover.real_backend.driver.trial import EngineKey, Trial

OUTCOMES = ("ok", "refused", "recomputed", "failed", "degraded", "leak", "hang", "crash", "corrupt")
"""From best to worst."""


def worst(outcomes: list[str]) -> str:
    """Return the worst of some outcomes; `ok` for none."""
    return max(outcomes, key=OUTCOMES.index, default="ok")


KILLED = "killed by a planned fault"
"""The last step of a rank that can't be asked any more."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is left of a run when nothing moves any more: its engines' books and its ranks, still alive."""

    trial: Trial
    engines: Mapping[EngineKey, Engine]
    ranks: Mapping[EngineKey, list[Child]]
    transfer_ids: Sequence[set[str]]
    """By request, every id under which its control messages may go, as `repr` writes it: a key fault makes it anything."""
    past: Mapping[str, RankReport] = field(default_factory=dict)
    """What ranks had seen when a planned fault ended their first life."""


def conclude(evidence: Evidence, seconds: float, fired: tuple[int, ...]) -> TrialResult:
    """Look into every rank, and judge each request."""
    children = [child for ranks in evidence.ranks.values() for child in ranks]
    engines = evidence.engines.values()
    reports = {child.name: _ask(child, RankReport(child.name, last_step=KILLED), "report") for child in children}
    for name, before in evidence.past.items():
        now = reports[name]
        reports[name] = replace(now, notices=before.notices + now.notices, read_from=before.read_from | now.read_from)
    raised = [raised for engine in engines for raised in engine.raised]
    # vLLM's executor gives up on ranks in processes of their own after 300 s in a step; one rank alone is waited for.
    killed = any(engine.stalled and len(engine.ranks) > 1 for engine in engines)
    crashed = bool(raised) or killed
    nothing: list[Raised] = []
    results = [_judge(evidence, index, reports, crashed) for index in range(len(evidence.trial.setup.requests))]
    return TrialResult(
        requests=tuple(results),
        ranks=tuple(reports.values()),
        raised=(*raised, *(raised for child in children for raised in _ask(child, nothing, "raised"))),
        stalled=tuple(name for engine in engines for name in engine.stalled),
        outcome=worst([result.outcome for result in results]),
        seconds=seconds,
        fired=fired,
        stray=sum(_ask(child, 0, "stray") for child in children),
    )


def _ask(child: Child, otherwise: Any, method: str, *arguments: Any) -> Any:
    """Ask a rank, unless a planned fault killed it."""
    if child.planned_death:
        return otherwise
    return child.ask(method, *arguments)


def not_started(trial: Trial, raised: list[Raised], missing: list[str], seconds: float) -> TrialResult:
    """Return the result of engines that never came up: an exception, or a rank that waits for ever."""
    outcome = "crash" if raised else "hang"
    nothing = tuple(Coverage(0.0, 0.0, 1.0) for _ in range(trial.setup.decode.tp))
    empty = RequestResult(at_go=None, at_end=nothing, outcome=outcome)
    return TrialResult((empty,) * len(trial.setup.requests), (), tuple(raised), tuple(missing), outcome, seconds)


def _judge(evidence: Evidence, index: int, reports: Mapping[str, RankReport], crashed: bool) -> RequestResult:
    setup, request = evidence.trial.setup, evidence.trial.setup.requests[index]
    at_prefill: EngineKey = ("prefill", request.prefill_dp)
    at_decode: EngineKey = ("decode", request.decode_dp)
    decode_ranks = evidence.ranks[at_decode]
    decode = _tracked(evidence.engines[at_decode], index)
    prefill = _tracked(evidence.engines[at_prefill], index)

    def noticed(*kinds: str) -> tuple[str, ...]:
        """Return the prefill ranks whose listener took in a message of one of `kinds` about the request.

        An empty list of blocks tells nobody anything: it ends the listener.
        """
        ids = evidence.transfer_ids[index]
        return tuple(
            rank.name
            for rank in evidence.ranks[at_prefill]
            if any(
                notice.get("type") in kinds and repr(notice.get("transfer_id")) in ids and notice.get("block_notify_list") != []
                for notice in reports[rank.name].notices
            )
        )

    if setup.scenario.mode == "write":
        told = tuple(rank.name for rank in decode_ranks if rank.name in decode.reported)
    else:
        told = tuple(rank.name for rank in decode_ranks if _read_all(reports[rank.name], setup.geometry.layers))
    released = tuple(rank.name for rank in evidence.ranks[at_prefill] if rank.name in prefill.reported)
    answered = noticed("remote_blocks", "release", "text")
    late = prefill.reaped or prefill.overran or any(name not in answered for name in released)
    held = prefill.state in ("held", "running") or decode.state == "aborting"
    at_go = None if decode.at_go is None else tuple(decode.at_go)
    return RequestResult(
        at_go=at_go,
        at_end=tuple(_ask(rank, Coverage(0.0, 0.0, 1.0), "grade", index, False) for rank in decode_ranks),
        outcome=_outcome(decode, at_go, late=late, held=held, crashed=crashed or "lost" in (prefill.state, decode.state)),
        go=decode.go,
        failed=decode.failed,
        recomputed=decode.recomputed,
        told=told,
        prefill_told=noticed("remote_blocks") if setup.scenario.mode == "write" else noticed("release", "text"),
        prefill_released=released,
        released_late=late,
        ended=decode.state in ("ended", "aborting") or decode.failed,
        held=held,
    )


def _outcome(decode: Tracked, at_go: tuple[Coverage, ...] | None, *, late: bool, held: bool, crashed: bool) -> str:
    found = []
    if at_go and not decode.failed and any(rank.covered < 1 for rank in at_go):
        found.append("corrupt")
    if crashed:
        found.append("crash")
    if decode.failed:
        found.append("failed")
    elif decode.state not in ("ended", "aborting"):
        found.append("hang")
    if decode.recomputed:
        found.append("recomputed")
    if held:
        found.append("leak")
    elif late and not decode.failed:
        found.append("degraded")
    return worst(found)


def _tracked(engine: Engine, index: int) -> Tracked:
    """Return what an engine knows of a request; nothing if its leg never came."""
    found = [request for request in engine.tracked.values() if request.index == index]
    return found[0] if found else Tracked(index, "")


def _read_all(report: RankReport, layers: int) -> bool:
    return any(report.read_from.values()) and report.reads >= layers and not report.failed_batches
