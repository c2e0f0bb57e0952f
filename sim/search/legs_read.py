"""What the engines read of a router's legs: seen on the model, by handing them dictionaries that note who asks for what."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvcover.faults.params import LEGS
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.routers import Router
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.simulate import run_world

Asked = Literal["value", "presence", "required"]
_MISSING = object()
_SIZE_KEYS = ("remote_tp_size", "tp_size")


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key of one leg: what was sent, whether its engine asks for it, and what it takes where the key is missing.

    `worse` says of values of other types what they lead to, where that is worse; `near` is a key that is read, of a like name.
    """

    key: str
    sent: bool
    read: bool
    value: Any = None
    missing: str = ""
    worse: dict[str, str] = {}
    near: str = ""


class _Noted(dict[str, Any]):
    """A leg that notes which of its keys are asked for, and what stands in for one that is not there."""

    def __init__(self, params: dict[str, Any], notes: dict[str, Any]) -> None:
        super().__init__(params)
        self._notes = notes

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key, _MISSING)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key), _MISSING)
        return super().__contains__(key)

    def _note(self, key: str, default: Any) -> None:
        known = self._notes.get(key)
        if key not in self._notes or (default is not None and known is None):
            self._notes[key] = default


def read_by_engines(scenario: Scenario, router: Router | None = None) -> tuple[Result, dict[str, list[Reading]]]:
    """Run a scenario on the model; what came of it, and the keys of each leg, in the order of the leg, missing ones after."""
    setup = resolve(scenario, router=router)
    notes: dict[str, dict[str, Any]] = {side: {} for side in LEGS}
    result, world = run_world(setup, lambda side, params: _Noted(params, notes[side]))
    releases = {"prefill": setup.prefill.release, "decode": setup.decode.release}
    sent: dict[str, dict[str, Any]] = {side: {} for side in LEGS}
    for (_request, side), params in world.legs.items():
        sent[side] = {**params, **sent[side]}
    return result, {side: _readings(sent[side], notes[side], releases[side]) for side in LEGS}


def _readings(sent: dict[str, Any], notes: dict[str, Any], release: ConnectorRelease) -> list[Reading]:
    found = [Reading(key=key, sent=True, read=key in notes, value=value) for key, value in sent.items()]
    for key, default in notes.items():
        if key not in sent:
            found.append(Reading(key=key, sent=False, read=True, missing=_stands_in(key, default, release)))
    return found


def _stands_in(key: str, default: Any, release: ConnectorRelease) -> str:
    """What a missing key counts as, in words."""
    if key in _SIZE_KEYS:
        return FIELDS["peer_tp"].policies[release.peer_tp].text
    if default is _MISSING:
        return "required: without it the engine raises, or does nothing"
    if default is None:
        return "counts as not given"
    return f"counts as {default!r}"
