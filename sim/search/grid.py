"""Every single fault that a small scenario has a place for: kinds × addresses, found from a run without faults."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvcover.faults import KINDS, FaultKind
from kvcover.faults.params import LEGS, parse_key_fault
from kvcover.sim.scenario.routers import TOY_PROXY
from kvcover.sim.scenario.scenario import Scenario, Side, Timers
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.shrink import Draft
from kvcover.sim.simulate import run_world
from kvcover.sim.world import World


def side_of(draft: Draft, name: str) -> Draft:
    """One side of a draft, there from now on."""
    side: Draft = draft.setdefault(name, {})
    return side


def sizes_of(draft: Mapping[str, Any], field: str) -> tuple[int, int]:
    """One size (`tp` or `dp`) of both sides of a draft."""
    prefill, decode = (draft.get(side, {}).get(field, 1) for side in ("prefill", "decode"))
    return prefill, decode


def request_count(draft: Mapping[str, Any]) -> int:
    """How many requests a draft has."""
    requests = draft.get("requests") or max(sizes_of(draft, "dp"))
    return requests if isinstance(requests, int) else len(requests)


def key_fault_bodies(key: str, value: Any) -> list[str]:
    """Everything that may happen to one key: gone, misnamed, that of another leg, or another value of any JSON type."""
    renamed = key.removeprefix("remote_") if key.startswith("remote_") else f"remote_{key}"
    values: list[Any] = [None, 0, 1, -1, 2, "", "x", True, False, []]
    if isinstance(value, list):
        values += [value[::-1], value[1:], [0, *value[1:]]]
    elif isinstance(value, int) and not isinstance(value, bool):
        values += [value + 1, value * 2, str(value)]
    own = json.dumps(value)
    texts = dict.fromkeys(json.dumps(other) for other in values)
    bodies = [f"drop:{key}", f"rename:{key}={renamed}", f"swap:{key}", f"stale:{key}"]
    return bodies + [f"set:{key}={text}" for text in texts if text != own]


def key_faults(world: World) -> Iterator[str]:
    """Every key fault that changes a leg which this world really sent: by leg, by request, and on both legs."""
    count = len(world.transfers)
    for leg, other in (LEGS, LEGS[::-1]):
        for transfer in world.transfers:
            request = transfer.index
            sent, meant = world.legs.get((request, leg), {}), world.router.dispatch(transfer).written(other)
            previous = world.legs.get((request - 1, leg))
            for body in (body for key, value in sent.items() for body in key_fault_bodies(key, value)):
                if not parse_key_fault(body).rewrite(sent, previous if body.startswith("stale:") else meant)[1]:
                    continue
                yield from (body, f"{body}@{leg}")
                if count > 1:
                    yield f"{body}@{leg}#{request}"
                if 0 < request < count - 1:
                    yield f"{body}@{leg}#{request}+"


EVENT_FAULT_KINDS = tuple(kind for kind in KINDS.values() if kind.point != "params" and "model" in kind.tiers)
# In each mode: the messages that are sent, and to which side.
_MESSAGES = {"write": {"remote_blocks": "P", "write_done": "D", "write_failed": "D"}, "read": {"release": "P"}}
_LONG = "LONG"
_SOME: dict[str, tuple[str, ...]] = {
    "ms": ("0", "3", _LONG), "for": ("1", _LONG), "port": ("1",), "fraction": ("0.5",), "factor": ("10", "1000"),
    "dp": ("0", "1"), "at": ("before", "waiting", "after"), "times": ("1", "1000"),
}  # fmt: skip

# Kinds of which not every parameter goes with every other.
_DETAILS: dict[str, list[str]] = {"stale-registration": [",tp=1", ",tp=8", ",dp=2", ",port=1", ",tp=1,for=1"]}


def event_fault_texts(kind: FaultKind, draft: Mapping[str, Any]) -> list[str]:
    """Every fault of one event kind: each target, some values of what it takes, on all events or on those of one rank."""
    mode: str = draft.get("mode", "write")
    ranks = {letter: _rank_names(letter, *sizes) for letter, sizes in zip("PD", _each_side(draft), strict=True)}
    long = str(_long_ms(draft))
    takes = [[f",{name}={long if value == _LONG else value}" for value in _SOME[name]] for name in _SOME if name in kind.params]
    details = _DETAILS.get(kind.name) or ["".join(values) for values in itertools.product(*takes)]
    texts = []
    for target, aims in _targets(kind, mode, ranks, request_count(draft)):
        texts += [f"{kind.name}:{target}{aim}{detail}" for detail in details for aim in aims]
    return texts


def _long_ms(draft: Mapping[str, Any]) -> int:
    """A time that outlasts every timer: 100 s, or the sum of all timers if the draft sets them and that is less."""
    timers = draft.get("timers", {})
    return min(100_000, round(1000 * sum(timers.values()))) if len(timers) == len(Timers.__struct_fields__) else 100_000


def _targets(kind: FaultKind, mode: str, ranks: Mapping[str, list[str]], requests: int) -> list[tuple[str, list[str]]]:
    """What a kind may aim at, and each way to aim at less than all of it."""
    what = kind.syntax.partition(":")[2].partition(",")[0]
    if what == "MESSAGE":
        return [(name, ["", ",n=0", *(f",to={rank}" for rank in ranks[letter])]) for name, letter in _MESSAGES[mode].items()]
    if what == "write|read":
        return [(mode, ["", ",n=0", *(f",from={rank}" for rank in ranks["P"]), *(f",to={rank}" for rank in ranks["D"])])]
    if what == "RANK":
        return [(rank, [""]) for rank in (*ranks["P"], *ranks["D"])]
    if what == "REQUEST":
        return [(str(request), [""]) for request in range(requests)]
    return [(side, [""]) for side in LEGS]


def _each_side(draft: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(dp, tp) of prefill and of decode."""
    return list(zip(sizes_of(draft, "dp"), sizes_of(draft, "tp"), strict=True))


def _rank_names(letter: str, dp: int, tp: int) -> list[str]:
    return [f"{letter}{d}.{t}" if dp > 1 else f"{letter}{t}" for d in range(dp) for t in range(tp)]


def event_faults(world: World) -> Iterator[str]:
    """Every event fault of every kind, but for messages that this world never sent."""
    draft = msgspec.to_builtins(world.setup.scenario)
    kinds = {row[1] for row in world.history.rows}
    unsent = [f":{name}" for name in ("write_done", "write_failed", "release") if f"{name}_sent" not in kinds]
    for kind in EVENT_FAULT_KINDS:
        for text in event_fault_texts(kind, draft):
            if not any(message in text for message in unsent):
                yield text


# Each lists the faults of one point that can fire in a world which ran without faults.
FAULT_LISTS: dict[str, Callable[[World], Iterable[str]]] = {"keys": key_faults, "events": event_faults}


def faults_of(draft: Mapping[str, Any]) -> list[str]:
    """Every single fault at every address of a scenario."""
    world = run_world(resolve(msgspec.convert({**draft, "faults": []}, Scenario)))[1]
    return list(dict.fromkeys(fault for list_them in FAULT_LISTS.values() for fault in list_them(world)))


def legs_of(draft: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The legs that the draft's router sends, in a small world of that kind."""
    prefill_dp, decode_dp = (min(dp, 2) for dp in sizes_of(draft, "dp"))
    release = draft["release"]
    router, mode = draft.get("router", TOY_PROXY), draft.get("mode", "write")
    return _probe(release, draft.get("decode_release", release), router, mode, prefill_dp, decode_dp)


@functools.cache
def _probe(release: str, decode_release: str, router: str, mode: Any, prefill_dp: int, decode_dp: int) -> dict[str, dict[str, Any]]:
    scenario = Scenario(
        release=release, decode_release=decode_release, router=router, mode=mode, requests=1, prompt_tokens=1,
        model="layers=1,mla=1", prefill=Side(dp=prefill_dp), decode=Side(dp=decode_dp),
    )  # fmt: skip
    legs = run_world(resolve(scenario))[1].legs
    return {leg: legs[0, leg] for leg in LEGS if (0, leg) in legs}
