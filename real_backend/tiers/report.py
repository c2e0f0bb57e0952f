"""From what a connector run saw to the result that every tier gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from kvcover.real_backend.driver.race import race_of
from kvcover.real_backend.driver.reports import Coverage, RankReport, TrialResult
from kvcover.real_backend.driver.trial import Trial
from kvcover.real_backend.driver.verdict import KILLED
from kvcover.real_backend.machine.trees import Tree
from kvcover.sim.results.findings import span
from kvcover.sim.results.result import Check, FaultFired, Finding, RankCoverage, Result, Sets
from kvcover.sim.simulate import replay_line

_LOG_LINES = 40


def to_result(
    trial: Trial, seen: TrialResult, trees: tuple[Tree, Tree], infos: tuple[dict[str, Any], dict[str, Any]], vllm: str | None
) -> Result:
    """Put a run into the form of a result."""
    setup, scenario = trial.setup, trial.setup.scenario
    view = _View(trial, seen)
    faults = [
        FaultFired(fault=str(fault), fired=keys + events)
        for fault, keys, events in zip(setup.faults, trial.keys.fired, seen.fired or (0,) * len(trial.keys.fired), strict=True)
    ]
    unfired = [fault.fault for fault in faults if not fault.fired]
    ranks = view.ranks()
    sets = view.sets(ranks)
    replay = replay_line(scenario) + " --tier connector" + (f" --vllm {vllm}" if vllm else "")
    return Result(
        tier="connector",
        release=_release(trees[0], infos[0], setup.prefill.release.name),
        decode_release=_release(trees[1], infos[1], setup.decode.release.name),
        mode=scenario.mode,
        model=scenario.model,
        router=setup.router.name,
        seed=scenario.seed,
        prefill={"tp": setup.prefill.tp, "dp": setup.prefill.dp},
        decode={"tp": setup.decode.tp, "dp": setup.decode.dp},
        outcome="vacuous" if unfired else seen.outcome,
        coverage=view.share(lambda request: request.coverage, lambda cells: cells.covered),
        coverage_end=view.share(lambda request: request.at_end, lambda cells: cells.covered),
        wrong=view.share(lambda request: request.coverage, lambda cells: cells.wrong),
        stray=seen.stray,
        by_rank=ranks,
        by_request=[request.outcome for request in seen.requests],
        sets=sets,
        findings=[*(_unfired(fault) for fault in unfired), *view.findings(ranks, sets)],
        checks=view.checks(sets),
        faults=faults,
        digest=None,
        events=sum(len(rank.notices) for rank in seen.ranks),
        virtual_ns=None,
        seconds=seen.seconds,
        replay=replay,
        scenario=msgspec.to_builtins(scenario),
        backend=_backend(trial, seen, infos),
    )


def _release(tree: Tree, info: dict[str, Any], name: str) -> str:
    """What ran: the tree's own version; a working copy that doesn't say its version goes under the scenario's."""
    version = str(tree.version or info.get("vllm") or name)
    return version if tree.kind != "working copy" else f"{version} ({tree.path.name if tree.path else 'installed'})"


def _backend(trial: Trial, seen: TrialResult, infos: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    prefill, decode = ({key: value for key, value in info.items() if key != "head_axis"} for info in infos)
    race = race_of(trial, seen)
    return {
        "mori": "loopback",
        "cells": "tagged 4-byte values",
        "layer_collectives": True,
        "prefill_vllm": prefill,
        "decode_vllm": decode,
        "timers_s": {
            "transfer_timeout": round(trial.limits.transfer_s, 3),
            "defer_timeout": round(trial.limits.defer_s, 3),
            "recv_abort_timeout": round(trial.limits.read_abort_s, 3),
        },
        "race": asdict(race) if race else None,
        "log_tail": _log(seen),
    }


def _log(seen: TrialResult) -> list[str]:
    lines = [f"{each.rank} {each.call}: {each.kind}: {each.text}" for each in seen.raised]
    lines += [f"{rank.name}: {text}" for rank in seen.ranks for text in rank.warnings if "experimental" not in text]
    return lines[-_LOG_LINES:]


def _unfired(fault: str) -> Finding:
    return Finding(kind="vacuous", text=f"{fault} never fired", causes=["nothing that it aims at happened"])


def _needed_blocks(trial: Trial, index: int) -> int:
    """Return how many blocks of a request decode needs, over all layers, each counted with its planes and heads."""
    decode, request = trial.setup.decode, trial.setup.requests[index]
    tables = trial.tables[index]["decode"]

    def needed(table: int) -> int:
        return sum(block > 0 for block in tables[table][: request.blocks])

    return sum(needed(group.table) * len(group.layers) * group.shape.planes * group.shape.heads for group in decode.groups)


class _View:
    """A run, looked at in the ways that a result needs."""

    def __init__(self, trial: Trial, seen: TrialResult) -> None:
        self._setup, self._limits, self._seen = trial.setup, trial.limits, seen
        # A rank's cells grow with the blocks that it needs, in each layer.
        self._weights = [_needed_blocks(trial, index) for index in range(len(trial.tables))]
        self._placed = list(zip(trial.setup.requests, seen.requests, self._weights, strict=True))

    def share(self, cells: Callable[[Any], Iterable[Coverage]], part: Callable[[Coverage], float]) -> float:
        """A fraction over all decode ranks and requests, weighted by their cells."""
        total = sum(weight * self._setup.decode.tp for weight in self._weights)
        return sum(weight * part(rank) for _, request, weight in self._placed for rank in cells(request)) / total

    def ranks(self) -> list[RankCoverage]:
        size, found = self._setup.decode, []
        for dp in range(size.dp):
            mine = [(request, weight) for placed, request, weight in self._placed if placed.decode_dp == dp]
            total = sum(weight for _, weight in mine)
            for tp in range(size.tp):
                name = size.rank_name(dp, tp)
                found.append(self._rank(dp, tp, name, mine, total))
        return found

    def _rank(self, dp: int, tp: int, name: str, mine: list[tuple[Any, int]], total: int) -> RankCoverage:
        if not mine:
            return RankCoverage(dp=dp, tp=tp, coverage=None, wrong=None, missing=None, told=None)

        def mean(at: str, part: str) -> float:
            return float(sum(weight * getattr(getattr(request, at)[tp], part) for request, weight in mine) / total)

        return RankCoverage(
            dp=dp,
            tp=tp,
            coverage=mean("coverage", "covered"),
            wrong=mean("coverage", "wrong"),
            missing=mean("coverage", "missing"),
            told=all(name in request.told for request, _ in mine),
            coverage_end=mean("at_end", "covered"),
        )

    def sets(self, ranks: list[RankCoverage]) -> Sets:
        size, requests = self._setup.decode, self._seen.requests
        held = {
            size.rank_name(placed.decode_dp, tp)
            for placed, request, _ in self._placed
            for tp, cells in enumerate(request.at_end)
            if cells.missing < 1
        }
        blind = any(rank.last_step == KILLED for rank in self._seen.ranks)  # it can't say any more whom it wrote to
        reached = held if blind else set(self.reached())
        names = [size.rank_name(rank.dp, rank.tp) for rank in ranks]
        prefill = self._setup.prefill
        sources = [prefill.rank_name(dp, tp) for dp in range(prefill.dp) for tp in range(prefill.tp)]
        told = {name for request in requests for name in request.prefill_told}
        released = {name for request in requests for name in request.prefill_released}
        return Sets(
            needed=[name for name, rank in zip(names, ranks, strict=True) if rank.coverage is not None],
            written=[name for name in names if name in held and name in reached],
            told=[name for name, rank in zip(names, ranks, strict=True) if rank.told],
            prefill_told=[name for name in sources if name in told],
            prefill_released=[name for name in sources if name in released],
        )

    def reached(self) -> dict[str, list[str]]:
        """Decode ranks into whose memory some transfer went, right or wrong, and who wrote there (in READ: themselves)."""
        found: dict[str, list[str]] = {}
        for rank in self._seen.ranks:
            if rank.read_from:
                found.setdefault(rank.name, []).append(rank.name)
            for key in rank.wrote_to:
                tp, dp = (int(part[2:]) for part in key.split(":")[-2:])  # role:host:port:tp<r>:dp<d>
                found.setdefault(self._setup.decode.rank_name(dp, tp), []).append(rank.name)
        return found

    # -- findings ------------------------------------------------------------------------------------------------

    def findings(self, ranks: list[RankCoverage], sets: Sets) -> list[Finding]:
        found = [*self._raised(), *self._stalled(), *self._failed_batches()]
        size, requests = self._setup.decode, self._seen.requests
        reached = self.reached()
        killed = {rank.name for rank in self._seen.ranks if rank.last_step == KILLED}
        unwritten = [name for name in sets.needed if name not in sets.written and name not in killed]
        if unwritten and any(request.outcome not in ("ok", "recomputed") for request in requests):
            causes = [f"{span(writers)} wrote to {name}" for name, writers in reached.items()] or ["nothing was written at all"]
            found.append(Finding(kind="not-written", text=f"{span(unwritten)} got nothing", causes=causes + self._dialled()))
        short = [size.rank_name(r.dp, r.tp) for r in ranks if r.told and r.coverage is not None and r.coverage < 1]
        early = [size.rank_name(r.dp, r.tp) for r in ranks if (r.coverage or 0.0) < (r.coverage_end or 0.0)]
        if early and self._setup.scenario.mode == "read":
            found.append(
                Finding(kind="used-before-landing", text=f"{span(early)} used layers before their reads landed", causes=[])
            )
        if short and self._setup.scenario.mode == "write":
            found.append(Finding(kind="told-without-data", text=f"told done with cells missing or wrong: {span(short)}", causes=[]))
        if any(request.outcome == "hang" for request in requests):
            found.append(self._hang(sets))
        if any(request.held for request in requests) and not any(each.rank[0] in "Pp" for each in self._seen.raised):
            found.append(
                Finding(kind="leak", text="an engine still holds a request's blocks when all timers have expired", causes=[])
            )
        elif any(request.released_late for request in requests):
            defer = self._limits.defer_s
            found.append(Finding(kind="held-until-timer", text="prefill held blocks, or a step, until a timer fired",
                                 causes=[f"defer_timeout is {defer:g} s in this run"]))  # fmt: skip
        return found

    def _raised(self) -> list[Finding]:
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for each in self._seen.raised:
            groups.setdefault((each.call, each.kind, each.text, each.broken), []).append(each.rank)
        found = []
        for (call, kind, text, broken), who in groups.items():
            causes = ["no fault of the protocol"] if broken else []
            causes += [f"caused by {broken}"] if broken not in ("", f"{kind}: {text}") else []
            said = f"{span(dict.fromkeys(who))}: {kind} in {call}: {' '.join(text.split())[:300]}"
            found.append(Finding(kind="broken" if broken else "raised", text=said, causes=causes))
        return found

    def _stalled(self) -> list[Finding]:
        names = self._seen.stalled
        if not names:
            return []
        what = "never came up" if not self._seen.ranks else "never came back from a step"
        return [Finding(kind="stalled", text=f"{span(names)} {what}", causes=self._last_steps(set(names)))]

    def _failed_batches(self) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for rank in self._seen.ranks:
            for text in rank.failed_batches:
                groups.setdefault(text.split(": ")[-1], []).append(rank.name)
        return [
            Finding(
                kind="transfer-failed",
                text=f"{len(who)} {'batch' if len(who) == 1 else 'batches'} of {span(dict.fromkeys(who))}: {text}",
                causes=[],
            )
            for text, who in groups.items()
        ]

    def _hang(self, sets: Sets) -> Finding:
        untold = [name for name in sets.needed if name not in sets.told]
        timers = f"transfer {self._limits.transfer_s:g} s, defer {self._limits.defer_s:g} s"
        who = f"{span(untold)} never told" if untold else "every rank told, but the request never ended"
        return Finding(kind="hang", text=f"{who}; all of the connector's timers ({timers}) have expired",
                       causes=self._last_steps(None))  # fmt: skip

    def _last_steps(self, names: set[str] | None) -> list[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for rank in self._seen.ranks:
            if names is None or rank.name in names:
                what = rank.last_step.split(", ", 1)[-1] if rank.last_step.startswith("step ") else rank.last_step
                groups.setdefault((rank.name[0], what), []).append(rank.name)
        return [f"{span(who)}, last step: {what}" for (_, what), who in groups.items()]

    def _dialled(self) -> list[str]:
        owners = {port: rank.name for rank in self._seen.ranks for port in rank.bound}
        groups: dict[str, list[str]] = {}
        for rank in self._seen.ranks:
            for port in rank.dialled:
                if rank.name[0] != owners.get(port, "?")[0]:
                    groups.setdefault(owners.get(port, f"port {port}, which nobody bound"), []).append(rank.name)
        return [f"{span(dict.fromkeys(who))} dialled {to}" for to, who in groups.items()]

    # -- checks --------------------------------------------------------------------------------------------------

    def checks(self, sets: Sets) -> list[Check]:
        requests, seen = self._seen.requests, self._seen
        went = [request for request in requests if request.at_go is not None]
        short = [index for index, r in enumerate(requests) if r.at_go is not None and any(cells.covered < 1 for cells in r.at_go)]
        unended = [index for index, request in enumerate(requests) if not request.ended]
        late = any(request.released_late for request in requests)
        held = any(request.held for request in requests)
        dead = [f"{each.rank}: {each.kind}" for each in seen.raised]
        started = bool(seen.ranks)

        def check(name: str, good: bool, reason: str, known: bool = True) -> Check:
            return Check(name=name, verdict=("pass" if good else "fail") if known else "unknown", reason=reason)

        return [
            check("coverage-at-go", not short, f"requests {short} went with cells missing or wrong" if short else
                  "all cells were there" if went else "no request went", known=bool(went)),
            check("told-written-needed", sets.needed == sets.written == sets.told,
                  f"needed {len(sets.needed)}, written {len(sets.written)}, told {len(sets.told)} ranks", known=started),
            check("no-stray-write", not seen.stray, f"{seen.stray} cells of other requests or free blocks changed",
                  known=seen.stray is not None),
            check("every-request-ends", not unended, f"requests {unended} never ended" if unended else "all ended"),
            check("nothing-held", not held and not late, "blocks held for ever" if held else
                  "blocks held until a timer" if late else "all blocks free again", known=started),
            check("engine-alive", not dead and not seen.stalled, "; ".join(dead[:4]) or
                  (f"{span(seen.stalled)} stalled" if seen.stalled else "both engines live")),
        ]  # fmt: skip


__all__ = ["RankReport", "to_result"]
