"""The connector tier: scenarios on vLLM's own connector.

Scenarios of one pair of trees share one import, and run at the same time as far as cores and memory allow. With
`KVCOVER_DEVICE=cuda` caches are in GPU memory.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvcover.real_backend.driver import logs
from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.driver.processes import device
from kvcover.real_backend.driver.reports import RunSeen
from kvcover.real_backend.driver.trial import ROLES, Limits, Trial
from kvcover.real_backend.machine import mori
from kvcover.real_backend.machine.room import check_room
from kvcover.real_backend.machine.trees import Tree, check_machine, choose, release_of
from kvcover.real_backend.tiers.declared import DRAWN, INJECTED, PINS, fit
from kvcover.real_backend.tiers.report import to_result
from kvcover.real_backend.tiers.translate import free_mb, memory_mb, refuse_unlike_layers, to_trial
from kvcover.sim import launch
from kvcover.sim.errors import MachineError, TierError, TooBusy
from kvcover.sim.progress import Progress, progress
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.tiers import NOT_BEGUN, Capabilities, Pace, Tier

_RANKS_A_CORE = 8
_RANKS_A_GPU = 16
_ATTEMPTS = 3
_WORKERS = 32
_POLL_S = 0.2
_COME_BACK_S = 5.0


@dataclass(frozen=True, slots=True)
class _Shared:
    """Scenarios that share a harness: positions in the order that was asked for, and what they run on."""

    trees: tuple[Tree, Tree]
    read_abort_s: float
    trials: dict[int, Trial]


class ConnectorTier(Tier):
    """Real code, real bytes, the loopback's `mori.io`: what acts on the router's legs, sockets, batches and processes."""

    name = "connector"
    can = Capabilities(faults=INJECTED, features=DRAWN, pins=PINS, takes_vllm=True, takes_mori=True)

    def fit(self, draft: dict[str, Any]) -> None:
        fit(draft)

    def release_of(self, vllm: str) -> str | None:
        prefill, decode = choose(vllm, NEWEST, None)
        return prefill.identity.release if prefill.identity.release == decode.identity.release else None

    def code_of(self, vllm: str) -> dict[str, str]:
        sides = zip(ROLES, choose(vllm, NEWEST, None), strict=True)
        return {f"{side}'s {name}": digest for side, tree in sides for name, digest in tree.files}

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        mori.chosen()
        _group([scenario], [vllm])

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> Sequence[Result | TierError]:
        check_machine()
        mori.chosen()  # what is not there is said before anything starts
        groups = _group(scenarios, vllms)
        _check_room([trial for group in groups for trial in group.trials.values()])
        results: dict[int, Result | TierError] = {}
        with progress(len(scenarios), "starting") as bar, launch.work_folder() as work:
            harnesses: list[Harness] = []
            try:
                for group in groups[:2]:
                    harnesses.append(_start(group, work))
                for position, group in enumerate(groups):
                    results |= _run_group(group, harnesses[position], vllms, bar, keep_errors, pace)
                    harnesses[position].close()
                    if position + 2 < len(groups):
                        harnesses.append(_start(groups[position + 2], work))
            finally:
                for harness in harnesses:
                    harness.close()
                logs.keep(Path(work))
        return [results[index] for index in range(len(scenarios))]


connector_tier = ConnectorTier()


def _group(scenarios: Sequence[Scenario], vllms: Sequence[str | None]) -> list[_Shared]:
    groups: dict[tuple[Tree, Tree, float], _Shared] = {}
    for index, (scenario, vllm) in enumerate(zip(scenarios, vllms, strict=True)):
        trees = choose(vllm, scenario.release, scenario.decode_release)
        trial = to_trial(as_trees(scenario, trees) if vllm else scenario)
        geometry = trial.setup.geometry
        if geometry.layers == 1 and not geometry.mla:
            raise TierError("model", "one layer of split K and V can't be run on the connector tier", "use two layers")
        if device() == "cuda":
            refuse_unlike_layers(trial)
        key = (*trees, trial.limits.read_abort_s)
        groups.setdefault(key, _Shared(trees, key[2], {})).trials[index] = trial
    return list(groups.values())


def _check_room(trials: Sequence[Trial]) -> None:
    """Raise TierError if the machine has no room for the largest, or for as many as will run at a time."""
    largest = max(trial.ranks for trial in trials)
    at_once = min(sum(trial.ranks for trial in trials), max(largest, _Budget().ranks))
    check_room(largest, at_once, max(memory_mb(trial) // trial.ranks for trial in trials))


def as_trees(scenario: Scenario, trees: tuple[Tree, Tree]) -> Scenario:
    """The scenario with the releases that the trees of `--vllm` are, as far as the model knows them."""
    prefill = release_of(trees[0], scenario.release)
    one = trees[0] == trees[1] and scenario.decode_release is None
    decode = prefill if one else release_of(trees[1], scenario.decode_release or NEWEST)
    return msgspec.structs.replace(scenario, release=prefill, decode_release=None if decode == prefill else decode)


def _start(group: _Shared, work: Path) -> Harness:
    folder = Path(tempfile.mkdtemp(dir=work))
    library = mori.chosen()
    return Harness(
        group.trees[0].path,
        folder,
        group.read_abort_s,
        group.trees[1].path if group.trees[1] != group.trees[0] else None,
        library.folder if library else None,
    )


def _run_group(
    group: _Shared, harness: Harness, vllms: Sequence[str | None], bar: Progress, keep_errors: bool, pace: Pace
) -> dict[int, Result | TierError]:
    bar.say(f"importing vLLM {group.trees[0].name}")
    infos = (harness.info("prefill"), harness.info("decode"))
    budget = _Budget()
    alone = len(group.trials) == 1
    largest = max(trial.ranks for trial in group.trials.values())
    load = 0 if alone else max(largest, budget.ranks)
    results: dict[int, Result | TierError] = {}
    bar.say(f"vLLM {group.trees[0].name}")
    pool = ThreadPoolExecutor(1 if alone else _WORKERS)
    running: dict[Future[tuple[Trial, RunSeen]], int] = {}
    try:
        for index, trial in group.trials.items():
            running[pool.submit(_run_one, harness, trial, budget, load, pace)] = index
        while running:
            done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                index = running.pop(future)
                try:
                    trial, seen = future.result()
                    results[index] = to_result(trial, seen, group.trees, infos, vllms[index])
                except TierError as error:
                    if not keep_errors:
                        raise
                    results[index] = error
                pace.done(index, results[index])
                bar.advance()
    except BaseException:
        budget.stop()
        harness.close()  # ends every process, so that the threads come back, and leave their folders
        wait(running, timeout=_COME_BACK_S)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return results


def _run_one(harness: Harness, trial: Trial, budget: _Budget, load: int, pace: Pace) -> tuple[Trial, RunSeen]:
    """What was run, with its timers, and what was seen."""
    with budget.share(trial):
        if pace.over():
            raise NOT_BEGUN
        try:
            return _run_steadily(harness, trial, max(load, trial.ranks))
        except ValueError as error:
            raise TierError("scenario", str(error), "use --tier model") from None
        except OSError as error:
            raise MachineError("--tier connector", str(error), "free some memory, files or disk") from None


def _run_steadily(harness: Harness, trial: Trial, load: int) -> tuple[Trial, RunSeen]:
    """Run it again, with longer timers, if the machine spoilt it; and once more if it stood still with nothing done to it.

    What a machine spoilt says nothing, so that the next attempt takes nothing away: it counts its faults anew.
    """
    for attempt in range(_ATTEMPTS):
        legs, keys = copy.deepcopy((trial.legs, trial.keys))  # together: legs that are still to be written count in the same keys
        slower = replace(trial, limits=Limits.of(trial.setup, load * 2**attempt), legs=legs, keys=keys)
        last = attempt == _ATTEMPTS - 1
        try:
            seen = harness.run(slower)
        except TooBusy:
            if last:
                raise
            continue
        except MachineError:  # somebody stopped or killed a process, say: hardly twice, and a planned fault may look like it
            if attempt or trial.setup.faults:
                raise
            continue
        if not seen.stalled or trial.setup.faults or attempt:
            break
    return slower, seen


class _Budget:
    """What may run at a time: ranks by cores, and memory. A trial larger than all of it runs alone."""

    def __init__(self) -> None:
        self.ranks = _RANKS_A_CORE * len(os.sched_getaffinity(0)) if sys.platform == "linux" else _RANKS_A_CORE
        if device() == "cuda":
            self.ranks = min(self.ranks, _RANKS_A_GPU)
        self._memory_mb = 0.6 * free_mb()
        self._used_ranks, self._used_mb, self._stopped = 0, 0, False
        self._changed = threading.Condition()

    def stop(self) -> None:
        """Nothing new may start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @contextmanager
    def share(self, trial: Trial) -> Iterator[None]:
        """Wait for room, and take it."""
        ranks, needed_mb = trial.ranks, memory_mb(trial)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fits(ranks, needed_mb))
            if self._stopped:
                raise TierError("--tier connector", "the run was ended", "")
            self._used_ranks += ranks
            self._used_mb += needed_mb
        try:
            yield
        finally:
            with self._changed:
                self._used_ranks -= ranks
                self._used_mb -= needed_mb
                self._changed.notify_all()

    def _fits(self, ranks: int, memory_mb: int) -> bool:
        if not self._used_ranks:
            return True
        return self._used_ranks + ranks <= self.ranks and self._used_mb + memory_mb <= self._memory_mb
