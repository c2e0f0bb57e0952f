"""A router's legs as people have them: in a TOML or JSON file, or cut out of a log.

A file holds `prefill` and `decode`, or these two below `write` and `read`. A leg is a table, or text such as a log line with
the dictionary in JSON or as Python prints it. Numbers are as sent. A value `$prefill.tp` is filled in at run time, see
`kvcover.sim.scenario.routers.NAMES`; `$$` begins a text that starts with one `$`.

What belongs to one request and one deployment, and not to the router, is made general, and said in `notes`: the transfer id,
the block ids and addresses that prefill answered, and addresses that were sent beside the request id.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults.params import LEGS
from kvcover.faults.read import UnfitJson, plain_json, too_deep
from kvcover.sim.errors import InputError, nearest, short

MODES = ("write", "read")
SUFFIXES = (".json", ".toml")
Leg = dict[str, Any]
_MOST_BYTES = 1 << 20
_EXAMPLE = 'write {"prefill": {…}, "decode": {…}} with both legs as they were sent'
_OPTIONS: dict[str, Any] = {
    "source": str,
    "mode": str,
    "forwards_response": bool,
    "decode_follows": bool,
    "pins": list,
    "registration_expiry_s": (int, float),
}
_PINNED = tuple(f"{mode}_{side}" for mode in MODES for side in LEGS)
_ADDRESS = ("remote_host", "remote_handshake_port", "remote_notify_port")
_ANSWERED = ("remote_block_ids", "remote_engine_id", *_ADDRESS)


class OwnLegs(msgspec.Struct, frozen=True, kw_only=True):
    """What was read: legs by (mode, side), the options of a `Router` that were given, and what was made general."""

    legs: dict[tuple[str, str], Leg]
    options: dict[str, Any] = {}
    notes: tuple[str, ...] = ()

    def modes(self) -> list[str]:
        """The modes of which there is a leg."""
        return [mode for mode in MODES if any((mode, side) in self.legs for side in LEGS)]


def is_file(name: str) -> bool:
    """Whether a router's name is that of a file."""
    return name.lower().endswith(SUFFIXES)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`. Raises InputError if it can't be read or is too long to be legs."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = f"can't be read: {getattr(error, 'strerror', None) or error}"
        raise InputError(path or "''", problem, "give the path of a file of legs, or - for standard input") from None
    if len(data) > _MOST_BYTES:
        raise InputError(path, f"is longer than {_MOST_BYTES >> 20} MiB", _EXAMPLE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(path, "is not UTF-8 text", _EXAMPLE) from None


def parse_legs(text: str, place: str, mode: str | None = None) -> OwnLegs:
    """The legs that a text holds; `mode` is that of legs which don't say theirs, else it is taken from what decode is sent.

    Raises InputError naming the place, the value and the nearest right one.
    """
    data = _table_of(text, place)
    if data is None:
        data = _by_side(_dictionaries(text), place)
    elif not _is_file_of_legs(data):
        data = _by_side([data], place)
    for key, value in data.items():
        if key not in (*LEGS, *MODES, *_OPTIONS):
            raise InputError(f"{place}: {key}", "no such field", nearest(str(key), (*LEGS, *MODES, *_OPTIONS)))
        kind = _OPTIONS.get(key)
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise InputError(f"{place}: {key}", f"{short(value)} is wrong", f"expected {_KINDS[key]}")
        for leg in value if key == "pins" else ():
            if leg not in _PINNED:
                raise InputError(f"{place}: pins", f"there is no leg {short(leg)}", nearest(str(leg), _PINNED))
    return _general(data, place, mode or data.get("mode"))


_KINDS = {
    "source": "a text", "mode": "write or read", "forwards_response": "true or false", "decode_follows": "true or false",
    "pins": 'a list such as ["write_decode"]', "registration_expiry_s": "a number of seconds",
}  # fmt: skip


# -- from text to tables -----------------------------------------------------------------------------------------


def _table_of(text: str, place: str) -> dict[str, Any] | None:
    """The whole text as one JSON or TOML table, None if it is none: then it is lines of a log."""
    problem = ""
    try:
        data = plain_json(text)
    except UnfitJson as error:
        raise InputError(place, str(error), _EXAMPLE) from None
    except ValueError as error:
        problem = f"is not JSON: {error}" if place.lower().endswith(".json") else ""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as toml_error:
            if place.lower().endswith(".toml"):
                problem = f"is not TOML: {toml_error}"
            data = None
    if isinstance(data, list):
        return None
    if data is None:
        if problem and not any(_dictionaries(text)):
            raise InputError(place, problem, _EXAMPLE)
        return None
    if not isinstance(data, dict) or not data:
        raise InputError(place, "holds no legs", _EXAMPLE)
    if too_deep(data):
        raise InputError(place, "is nested too deeply", _EXAMPLE)
    return _without_wrapping(data)


def _without_wrapping(data: dict[str, Any]) -> dict[str, Any]:
    """A request's body as it was logged has the leg under a name of its own."""
    inner = data.get("kv_transfer_params")
    return inner if isinstance(inner, dict) else data


def _is_file_of_legs(data: dict[str, Any]) -> bool:
    return any(key in data for key in (*LEGS, *MODES)) or not any(key.startswith(("do_", "remote_")) for key in data)


def _dictionaries(text: str) -> list[dict[str, Any]]:
    """Every outermost dictionary in a text, in JSON or as Python prints it."""
    return [_without_wrapping(found) for found in _scan(text) if found]


def _scan(text: str) -> Iterator[dict[str, Any]]:
    at = 0
    while (at := text.find("{", at)) >= 0:
        end = _closing(text, at)
        found = _literal(text[at:end]) if end else None
        if isinstance(found, dict):
            yield found
            at = end
        else:
            at += 1


_TOKEN = re.compile(r"""[{}]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")


def _closing(text: str, start: int) -> int:
    """Behind the brace that closes the one at `start`; 0 if none does. Braces in quotes don't count."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return 0


def _literal(text: str) -> Any:
    for read in (plain_json, ast.literal_eval):
        try:
            found = read(text)
            json.dumps(found, allow_nan=False)  # no sets, no bytes: it must be what a router can send
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return None if too_deep(found) else found
    return None


def _by_side(found: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """Legs without a name, by what they ask for."""
    data: dict[str, Any] = {}
    for leg in found:
        asked = [side for side, key in (("prefill", "do_remote_decode"), ("decode", "do_remote_prefill")) if leg.get(key)]
        if len(asked) != 1:
            hint = 'name it: {"prefill": {…}} or {"decode": {…}}'
            raise InputError(place, f"whose leg is {short(leg)}? it asks for {' and '.join(asked) or 'nothing'}", hint)
        if data.get(asked[0], leg) != leg:
            raise InputError(place, f"holds two different legs for {asked[0]}", "give those of one request")
        data[asked[0]] = leg
    if not data:
        raise InputError(place, "holds no legs", _EXAMPLE)
    return data


# -- from tables to legs -----------------------------------------------------------------------------------------


def _general(data: dict[str, Any], place: str, mode: str | None) -> OwnLegs:
    if mode is not None and mode not in MODES:
        raise InputError(f"{place}: mode", f"no mode {short(mode)}", nearest(str(mode), MODES))
    legs: dict[tuple[str, str], Leg] = {}
    bare = {side: _leg(data[side], f"{place}: {side}") for side in LEGS if side in data}
    if bare:
        for each in [mode] if mode else _modes_of(bare.get("decode")):
            legs |= {(each, side): dict(leg) for side, leg in bare.items()}
    for each in MODES:
        if each not in data:
            continue
        if not isinstance(data[each], dict):
            raise InputError(f"{place}: {each}", f"{short(data[each])} is no table of legs", _EXAMPLE)
        for side, leg in data[each].items():
            if side not in LEGS:
                raise InputError(f"{place}: {each}.{side}", "no such leg", nearest(str(side), LEGS))
            if (each, side) in legs:
                raise InputError(f"{place}: {each}.{side}", f"is given twice, here and as {side!r}", "leave out one of them")
            legs[each, side] = _leg(leg, f"{place}: {each}.{side}")
    if not legs:
        raise InputError(place, "holds no legs", _EXAMPLE)
    notes: list[str] = []
    for each in MODES:
        notes += _make_general(each, legs.get((each, "prefill")), legs.get((each, "decode")))
    options = {key: tuple(data[key]) if key == "pins" else data[key] for key in _OPTIONS if key in data and key != "mode"}
    return OwnLegs(legs=legs, options=options, notes=tuple(dict.fromkeys(notes)))


def _modes_of(decode: Leg | None) -> list[str]:
    """READ's decode leg names blocks, or takes them from prefill's answer; a prefill leg alone may be of either mode."""
    if decode is None:
        return list(MODES)
    reads = decode.get("remote_block_ids") or any(str(value).startswith("$response.") for value in decode.values())
    return ["read" if reads else "write"]


def _leg(given: Any, place: str) -> Leg:
    if isinstance(given, str):
        found = _dictionaries(given)
        if len(found) != 1:
            problem = f"{short(given)} holds {len(found) or 'no'} dictionaries"
            raise InputError(place, problem, 'write one such as {"do_remote_decode": true, …}')
        given = found[0]
    if not isinstance(given, dict):
        raise InputError(place, f"{short(given)} is no table", 'write one such as {"do_remote_decode": true, …}')
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:  # a date of TOML, nan
        raise InputError(place, f"can't be sent as JSON: {error}", "use numbers, texts, true, false, null, lists") from None
    return dict(given)


def _make_general(mode: str, prefill: Leg | None, decode: Leg | None) -> Iterator[str]:
    """Exchange, in place, what was one request's or one deployment's for what stands for it in any."""
    own = {side: leg.get("transfer_id") for side, leg in (("prefill", prefill), ("decode", decode)) if leg is not None}
    literal = {side: sent for side, sent in own.items() if isinstance(sent, str) and sent and not sent.startswith("$")}
    if prefill is not None and "prefill" in literal:
        prefill["transfer_id"] = "$transfer_id"
        yield "transfer_id: each request has its own"
    if decode is not None and "decode" in literal:
        if literal["decode"] == literal.get("prefill", literal["decode"]):
            decode["transfer_id"] = "$transfer_id" if mode == "write" or "prefill" in literal else "$response.transfer_id"
            yield "transfer_id: each request has its own"
        else:
            yield f"transfer_id: the legs name two transfers, and decode is always sent {short(literal['decode'])}"
    for leg in (prefill, decode):
        if leg is None:
            continue
        if mode == "read" and leg is decode:
            for key in _ANSWERED:
                if leg.get(key) and not str(leg[key]).startswith("$"):
                    leg[key] = f"$response.{key}"
                    yield f"{key}: as prefill answers it"
        elif named := [key for key in _ADDRESS if isinstance(leg.get(key), (str, int)) and not str(leg[key]).startswith("$")]:
            for key in named:
                del leg[key]
            yield f"{', '.join(named)}: taken for the true address, which the request id names too"
