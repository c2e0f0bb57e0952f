"""From recorded legs to what a router sends for any deployment: the templates of `kvcover.sim.scenario.routers`.

A value is a template where one fits every leg of a grid whose sizes all differ; else it must be the same in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvcover.real_backend.driver.trial import ROLES, Role
from kvcover.real_backend.router.record import Exchange, Shape
from kvcover.sim.errors import Inconclusive
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.scenario.legs_file import MODES
from kvcover.sim.scenario.routers import NAMES, Router, Template

_SIZES = (((4, 1), (8, 1)), ((4, 1), (8, 2)), ((4, 2), (8, 1)), ((4, 2), (8, 2)), ((16, 1), (2, 1)))
_PEER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
_PINNED = "remote_dp_rank"
_UNKNOWN = object()


def grid(modes: Iterable[str] = MODES, release: str = NEWEST) -> list[Shape]:
    """What templates are read from: few sizes that tell each other apart, and in READ answers unlike what registered."""
    shapes = []
    for mode in modes:
        shapes += [Shape(mode=mode, prefill=p, decode=d, release=release) for p, d in _SIZES]
        if mode == "read":
            shapes.append(Shape(mode=mode, prefill=(4, 2), decode=(8, 1), release=release, odd=True))
    return shapes


def fitted(name: str, exchanges: Sequence[Exchange]) -> tuple[Router, list[str]]:
    """The router whose legs these are, and what could not be told of them. Raises Inconclusive for a leg without parameters."""
    notes: list[str] = []
    legs: dict[str, Any] = {}
    pins: list[str] = []
    forwards = False
    for mode in dict.fromkeys(each.shape.mode for each in exchanges):
        mine = [each for each in exchanges if each.shape.mode == mode]
        for role in ROLES:
            rows = [_row(name, each, role) for each in mine]
            passes = (mode, role) == ("read", "decode") and all(reply and set(reply) <= set(params) for params, _, reply in rows)
            forwards |= passes
            legs[f"{mode}_{role}"], pinned, told = _template(mode, role, rows, passes)
            pins += [f"{mode}_{role}"] if pinned else []
            notes += told
    router = Router(name=name, **legs, forwards_response=forwards, pins=tuple(pins), decode_follows=_follows(exchanges),
                    source=f"{name}, recorded on loopback")  # fmt: skip
    return router, notes


def legs_as_file(router: Router) -> dict[str, Any]:
    """The same as a file for `--router`."""
    found: dict[str, Any] = {"source": router.source}
    for option in ("forwards_response", "decode_follows"):
        found |= {option: True} if getattr(router, option) else {}
    found |= {"pins": list(router.pins)} if router.pins else {}
    for mode in MODES:
        legs = {role: leg for role in ROLES if (leg := getattr(router, f"{mode}_{role}")) is not None}
        found |= {mode: legs} if legs else {}
    return found


def differences(router: Router, exchanges: Sequence[Exchange]) -> list[str]:
    """Where a router's legs are not those that were recorded, one line a key, leg and sizes."""
    found = []
    for each in exchanges:
        values, mode = values_in(each), each.shape.mode
        built = {
            "prefill": router.prefill_leg(mode, values),
            "decode": router.decode_leg(mode, values, each.prefill.reply),
        }
        for role in ROLES:
            sent = each.leg(role).params or {}
            for key in dict.fromkeys([*sent, *built[role]]):
                ours, theirs = (_text(table.get(key, _UNKNOWN)) for table in (built[role], sent))
                if ours != theirs:
                    (p, p_dp), (d, d_dp) = each.shape.prefill, each.shape.decode
                    where = f"{mode} {role} leg, P TP{p} DP{p_dp} → D TP{d} DP{d_dp}"
                    found.append(f"{where}: {key} is {theirs}, and {router.name} has {ours}")
    return list(dict.fromkeys(found))


def values_in(each: Exchange) -> dict[str, Any]:
    """What the `$` names stood for in one exchange; DP ranks that nobody named are 0."""
    values: dict[str, Any] = {"transfer_id": (each.prefill.params or {}).get("transfer_id")}
    for role in ROLES:
        values[f"{role}.tp"], values[f"{role}.dp"] = each.shape.size(role)
        named = (each.leg(_PEER[role]).params or {}).get(_PINNED)
        rank = each.leg(role).dp_rank
        values[f"{role}.dp_rank"] = (named if isinstance(named, int) else 0) if rank is None else rank
    return values


Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A leg's parameters, what names stood for, and what prefill had answered."""


def _row(name: str, each: Exchange, role: Role) -> Row:
    params = each.leg(role).params
    if params is None:
        raise Inconclusive(f"the {role} leg of {name} has no kv_transfer_params")
    values = values_in(each)
    for side in ROLES:
        if each.leg(side).dp_rank is None:
            values[f"{side}.dp_rank"] = _UNKNOWN
    return params, values, (each.prefill.reply or {}) if role == "decode" else {}


def _template(mode: str, role: Role, rows: list[Row], passes: bool) -> tuple[Template, bool, list[str]]:
    """A leg's template, whether it names the peer's DP rank where there are several, and what could not be told."""
    template: Template = {}
    notes: list[str] = []
    pinned = False
    for key in dict.fromkeys(key for params, _, _ in rows for key in params):
        has = [key in params for params, _, _ in rows]
        if passes and all(key in reply and _text(params[key]) == _text(reply[key]) for params, _, reply in rows):
            continue
        if not all(has) and key == _PINNED and has == [values[f"{_PEER[role]}.dp"] > 1 for _, values, _ in rows]:
            pinned = True
            continue
        value = _value(key, rows) if all(has) else _UNKNOWN
        if value is _UNKNOWN:
            seen = ", ".join(dict.fromkeys(_text(params[key]) for params, _, _ in rows if key in params))
            missing = "" if all(has) else ", on some legs only"
            notes.append(f"{mode} {role} leg: {key} = {seen[:80]}{missing}: nothing that registered explains it; left out")
        else:
            template[key] = value
    return template, pinned, notes


def _value(key: str, rows: list[Row]) -> Any:
    """The template or the constant that is right in all rows."""
    for name in NAMES:
        if all(_text(params[key]) == _text(values.get(name, _UNKNOWN)) for params, values, _ in rows):
            return f"${name}"
    if all(key in reply and _text(params[key]) == _text(reply[key]) for params, _, reply in rows):
        return f"$response.{key}"
    first = rows[0][0][key]
    if any(_text(params[key]) != _text(first) for params, _, _ in rows):
        return _UNKNOWN
    return f"${first}" if isinstance(first, str) and first.startswith("$") else first


def _text(value: Any) -> str:
    """A value so that true is not 1."""
    return "nothing" if value is _UNKNOWN else json.dumps(value, sort_keys=True)


def _follows(exchanges: Sequence[Exchange]) -> bool:
    """Whether decode's leg goes to prefill's DP rank: only a rank that decode doesn't have tells that from one of its own."""
    telling = [each for each in exchanges if each.shape.prefill[1] > 1 and each.shape.decode[1] == 1]
    return bool(telling) and all(
        each.decode.dp_rank is not None and each.decode.dp_rank == each.prefill.dp_rank for each in telling
    )
