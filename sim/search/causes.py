"""Causes that are shown: flip one thing at a time of a bad run, and see what makes it better.

What can be flipped: a policy that the run asked, to what another release does; a key of a leg, to what another router sends,
to the true size, or away; a planned fault, off. It *heals* if the finding is gone and the outcome is `ok`, and *mitigates* if
the run is better and not good. A refusal is neither, and so is a run in which nothing moves any more and that dies or hangs.
Where nothing moved before, a hang is better than a crash: the engine lives on, and others' requests with it.

The search runs on as few of the model's layers as show the same, what heals is proven on all of them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvcover.faults.params import LEGS
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.errors import InputError
from kvcover.sim.progress import each
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import REFERENCE, RELEASES
from kvcover.sim.releases.watched import watched
from kvcover.sim.results.chains import Cause, Found, Lever
from kvcover.sim.results.findings import find
from kvcover.sim.results.outcome import plan_of, rank_coverages, sets_of
from kvcover.sim.results.races import find_races
from kvcover.sim.results.result import OUTCOMES, Remedies, Remedy, Result, Shown
from kvcover.sim.results.verdict import judge_run
from kvcover.sim.scenario.routers import ROUTERS
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.simulate import record_of, replay_line, run_world
from kvcover.sim.world import World

Effect = Literal["heals", "mitigates", ""]
_ABSENT = object()


class Flip(NamedTuple):
    """One thing that is otherwise: in words, and as what it changes in a scenario."""

    lever: Lever
    text: str
    policy: str = ""
    faults: tuple[str, ...] = ()

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with this one thing changed."""
        if self.lever.kind == "policy":
            return msgspec.structs.replace(scenario, overrides=scenario.overrides | {self.lever.name: self.policy})
        kept = tuple(fault for fault in scenario.faults if self.lever.kind != "fault" or fault != self.lever.name)
        return msgspec.structs.replace(scenario, faults=(*kept, *self.faults))


class Seen(NamedTuple):
    """What a run came to, as far as it says whether another one is better."""

    outcome: str
    badness: tuple[int, int]
    coverage: float
    kinds: Counter[str]
    moved: bool


def _seen(result: Result) -> Seen:
    ranks = [OUTCOMES.index(outcome) for outcome in result.by_request]
    kinds = Counter(finding.kind for finding in result.findings)
    return Seen(result.outcome, (max(ranks), sum(ranks)), result.coverage, kinds, bool(result.sets.written))


def effect(before: Seen, after: Seen, kinds: Sequence[str]) -> Effect:
    """What a flip does about the findings of some `kinds`: it heals without any of them, and mitigates without the first."""
    if after.outcome in ("refused", "vacuous") or (after.outcome in ("crash", "hang") and before.moved and not after.moved):
        return ""
    if after.outcome == "ok" and not any(after.kinds[kind] for kind in kinds):
        return "heals"
    if before.outcome == "vacuous":
        return ""
    was, now = (before.badness, -before.coverage), (after.badness, -after.coverage)
    gone = bool(kinds) and after.kinds[kinds[0]] < before.kinds[kinds[0]]
    return "mitigates" if now < was or (now == was and gone) else ""


class Search:
    """The flips of one bad run, on as few layers as show what it shows.

    `levers`: flip only these; None: all that the run asked and sent.
    """

    def __init__(self, scenario: Scenario, levers: Iterable[Lever] | None = None) -> None:
        result, world = run_world(resolve(scenario))
        faults = tuple(map(str, world.setup.faults))  # however they were written
        self.scenario = msgspec.structs.replace(scenario, expect=None, faults=faults)
        self.result, self.whole = result, world.geometry
        self.found = _findings(world)
        self.geometry = _fewest_layers(self.scenario, self.whole, result)
        self.before = _seen(self._run(self.scenario))
        self.kinds = tuple(self.before.kinds)
        wanted = None if levers is None else set(levers)
        self.flips = [flip for flip in _flips(self.scenario, self.geometry, wanted) if wanted is None or flip.lever in wanted]
        self.tried: dict[tuple[Flip, ...], Seen | None] = {}
        self.proven: dict[tuple[Flip, ...], Seen] = {}

    def _run(self, scenario: Scenario) -> Result:
        return run_world(resolve(scenario, self.geometry))[0]

    def _try(self, *flips: Flip) -> None:
        """Run it with some flips, unless they make no sense together."""
        try:
            self.tried[flips] = _seen(self._run(_flipped(self.scenario, flips)))
        except InputError:
            self.tried[flips] = None

    def singles(self) -> None:
        """Every flip alone."""
        for flip in each(self.flips, "flips"):
            self._try(flip)

    def pairs(self, budget_s: float) -> None:
        """Pairs of flips none of which heals alone, the more promising first, for as long as the budget lasts."""
        end = time.monotonic() + budget_s
        left = [flip for flip in self.flips if self.effect_of(flip) != "heals"]
        # What made no sense alone may with another; what did something may do more with another.
        left.sort(
            key=lambda flip: (self.tried[flip,] is not None, self.effect_of(flip) != "mitigates", self.tried[flip,] == self.before)
        )
        order = sorted(itertools.combinations(range(len(left)), 2), key=sum)
        for first, second in order:
            if time.monotonic() > end:
                return
            if left[first].lever != left[second].lever:
                self._try(left[first], left[second])

    def prove(self) -> None:
        """What ended well on fewer layers, again on all of them."""
        for flips, after in self.tried.items():
            if after is not None and after.outcome == "ok":
                self.proven[flips] = _seen(run_world(resolve(_flipped(self.scenario, flips)))[0])

    def effect_of(self, *flips: Flip, kinds: Sequence[str] = ()) -> Effect:
        """What flips that were tried do to the findings of some kinds; to all of them without."""
        kinds = kinds or self.kinds
        if flips in self.proven:
            return effect(_seen(self.result), self.proven[flips], kinds)
        after = self.tried.get(flips)
        return "" if after is None else effect(self.before, after, kinds)

    def shown(self, found: Found) -> list[Shown]:
        """Of each cause of a finding the best that a flip of one of its levers does, alone or, if it heals, with another."""
        return [self._best(cause, found.kind) for cause in found.causes]

    def _best(self, cause: Cause, kind: str) -> Shown:
        mine = [flips for flips in self.tried if any(flip.lever in cause.levers for flip in flips)]
        effects = {(len(flips) == 1, self.effect_of(*flips, kinds=(kind,))) for flips in mine}
        if {(True, "heals"), (False, "heals")} & effects:
            return "heals"
        return "mitigates" if (True, "mitigates") in effects else "not shown"

    def remedies(self) -> list[Remedy]:
        """What heals, fewest flips first; then what mitigates alone."""
        effects = {flips: self.effect_of(*flips) for flips in self.tried}
        found = [
            self._remedy(flips, kind)
            for flips, kind in effects.items()
            if kind == "heals" or (kind == "mitigates" and len(flips) == 1)
        ]
        return sorted(found, key=lambda remedy: (remedy.effect != "heals", len(remedy.flips)))

    def _remedy(self, flips: tuple[Flip, ...], kind: Literal["heals", "mitigates"]) -> Remedy:
        after = self.proven.get(flips) or self.tried[flips]
        assert after is not None
        return Remedy(
            effect=kind,
            flips=[flip.text for flip in flips],
            outcome=after.outcome,
            coverage=after.coverage,
            full_size=flips in self.proven or self.geometry == self.whole,
            command=replay_line(_flipped(self.scenario, flips)),
        )


def explain(scenario: Scenario, budget_s: float | None = None) -> Result:
    """Run a scenario; if it is bad, or left to a race, say of each cause whether a flip shows it, and what makes it better.

    `budget_s`: try pairs of flips too, for so many seconds.
    """
    started = time.perf_counter()
    search = Search(scenario)
    verdict = judge_run(search.result)
    if verdict.passed or verdict.idle:
        return search.result
    search.singles()
    if budget_s is not None:
        search.pairs(budget_s)
    search.prove()
    findings = [msgspec.structs.replace(found.told(), shown=search.shown(found)) for found in search.found]
    remedies = search.remedies()
    told = Remedies(
        tried=len(search.flips),
        pairs=len(search.tried) - len(search.flips),
        layers=search.geometry.layers,
        of_layers=search.whole.layers,
        seconds=time.perf_counter() - started,
        found=remedies,
    )
    return msgspec.structs.replace(search.result, findings=findings, remedies=told)


def _flipped(scenario: Scenario, flips: Sequence[Flip]) -> Scenario:
    for flip in flips:
        scenario = flip.of(scenario)
    return scenario


def _findings(world: World) -> list[Found]:
    record = record_of(world)
    ranks = rank_coverages(record)
    return [*find(record, ranks, sets_of(record, ranks)), *find_races(record, plan_of(record))]


def _fewest_layers(scenario: Scenario, whole: Geometry, result: Result) -> Geometry:
    """The model with as few layers as give the same outcomes and the same kinds of findings; each kind of layer is kept."""
    minor = whole.minor_layers
    # The first layer of each kind is within the first so many.
    least = max(1, minor[0] + 1, next(layer for layer in range(whole.layers) if layer not in minor) + 1) if minor else 1
    count, goal = least, _signature(result)
    while count < whole.layers:
        try:
            geometry = whole.first(count)
            if _signature(run_world(resolve(scenario, geometry))[0]) == goal:
                return geometry
        except InputError:
            pass  # fewer block tables than the scenario names blocks for
        count *= 2
    return whole


def _signature(result: Result) -> tuple[str, list[str], list[str]]:
    return result.outcome, result.by_request, sorted(finding.kind for finding in result.findings)


# -- what can be flipped -----------------------------------------------------------------------------------------


def _flips(scenario: Scenario, geometry: Geometry, wanted: set[Lever] | None) -> Iterator[Flip]:
    """Faults first, then keys, then policies: at least the `wanted` ones. What proves nothing can only lose its faults."""
    kinds = None if wanted is None else {lever.kind for lever in wanted}
    asked: dict[str, set[str]] = {leg: set() for leg in LEGS}
    world = World(resolve(scenario, geometry, lambda leg, release: watched(release, asked[leg])))
    world.run()
    for fault in dict.fromkeys(map(str, scenario.faults)):
        yield Flip(Lever("fault", fault), f"without {fault}")
    if all(world.fired) and (kinds is None or "key" in kinds):
        yield from _key_flips(scenario, geometry, world)
    if all(world.fired):
        yield from _policy_flips(world.setup, asked)


def _policy_flips(setup: Setup, asked: dict[str, set[str]]) -> Iterator[Flip]:
    """Each policy that the run asked, as each other release has it. An override acts on both sides."""
    releases = {"prefill": setup.prefill.release, "decode": setup.decode.release}
    for field in FIELDS:
        sides = [leg for leg in LEGS if field in asked[leg]]
        present = {getattr(releases[leg], field) for leg in sides}
        for policy in dict.fromkeys(getattr(release, field) for release in RELEASES.values()):
            if sides and present != {policy}:
                who = [release.name for release in RELEASES.values() if getattr(release, field) == policy]
                meaning = FIELDS[field].policies[policy].text
                text = f"{field} = {policy} (asked by {' and '.join(sides)}), as in {_spans(who)}: {meaning}"
                yield Flip(Lever("policy", field), text, policy=policy)


def _spans(names: list[str]) -> str:
    """`0.24.0–0.26.0, reference`: neighbours in the order of releases."""
    known = list(RELEASES)
    runs: list[list[str]] = []
    for name in names:
        if runs and known.index(runs[-1][-1]) == known.index(name) - 1 and name != REFERENCE:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


Values = dict[int, Any]


def _key_flips(scenario: Scenario, geometry: Geometry, world: World) -> Iterator[Flip]:
    """Each key of both legs as the routers send it without faults, as the true size, and absent."""
    sent = {leg: _by_key(world, leg) for leg in LEGS}
    others = dict(_other_legs(scenario, geometry))
    for leg in LEGS:
        requests = [index for index, side in world.legs if side == leg and world.legs[index, side]]
        keys = dict.fromkeys([*sent[leg], *(key for legs in others.values() for key in legs[leg]), *_TRUE])
        for key in keys if requests else ():
            mine = sent[leg].get(key, {})
            sources = {"absent": {}, **({"as it truly is": _true(world, leg, key)} if key in _TRUE else {})}
            sources |= {f"as {name} sends it": legs[leg].get(key, {}) for name, legs in others.items()}
            texts: dict[tuple[str, ...], str] = {}
            for source, values in sources.items():
                if faults := _key_faults(leg, key, requests, mine, values):
                    texts.setdefault(faults, source)
            for faults, source in texts.items():
                yield Flip(Lever("key", key, leg), f"{' '.join(faults)}: `{key}` {source}", faults=faults)


def _by_key(world: World, leg: str) -> dict[str, Values]:
    """The values of each key of a leg, by request."""
    found: dict[str, Values] = {}
    for (request, side), params in world.legs.items():
        for key, value in params.items() if side == leg else ():
            found.setdefault(key, {})[request] = value
    return found


def _other_legs(scenario: Scenario, geometry: Geometry) -> Iterator[tuple[str, dict[str, dict[str, Values]]]]:
    """What each router sends, the scenario's own first, when no fault is planned."""
    own = resolve(scenario, geometry).router.name
    for name in (scenario.router, *(name for name in ROUTERS if name != own)):
        world = World(resolve(msgspec.structs.replace(scenario, router=name, faults=()), geometry))
        world.run()
        yield world.setup.router.name, {leg: _by_key(world, leg) for leg in LEGS}


def _key_faults(leg: str, key: str, requests: list[int], mine: Values, wanted: Values) -> tuple[str, ...]:
    """The key faults that turn what was sent into what is wanted; as one where all requests want the same."""
    groups: dict[str, list[int]] = {}
    for request in requests:
        value, now = wanted.get(request, _ABSENT), mine.get(request, _ABSENT)
        if value is not _ABSENT and (now is _ABSENT or json.dumps(value) != json.dumps(now)):
            groups.setdefault(f"set:{key}={json.dumps(value)}@{leg}", []).append(request)
        elif value is _ABSENT and now is not _ABSENT:
            groups.setdefault(f"drop:{key}@{leg}", []).append(request)
    every = len(groups) == 1 and len(next(iter(groups.values()))) == len(requests)
    return tuple(text if every else text + "".join(f"#{i}" for i in numbers) for text, numbers in groups.items())


_TRUE: dict[str, Callable[[Setup, Any, str], Any]] = {
    "remote_tp_size": lambda setup, request, side: getattr(setup, side).tp,
    "tp_size": lambda setup, request, side: getattr(setup, side).tp,
    "remote_dp_size": lambda setup, request, side: getattr(setup, side).dp,
    "remote_dp_size_local": lambda setup, request, side: getattr(setup, side).local_dp,
    "remote_dp_rank": lambda setup, request, side: getattr(request, f"{side}_dp"),
    "remote_hosts": lambda setup, request, side: list(getattr(setup, side).hosts),
}


def _true(world: World, leg: str, key: str) -> Values:
    """The sizes and ranks that the other engine really has, by request."""
    peer = "decode" if leg == "prefill" else "prefill"
    return {request.index: _TRUE[key](world.setup, request, peer) for request in world.setup.requests if not request.plain}
