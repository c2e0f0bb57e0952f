"""Key faults: what can go wrong with the dictionary `kv_transfer_params` on its way from the router to an engine.

Point `params`: a leg's dictionary leaves the router. The missing key that started this project is
`drop:remote_tp_size@prefill`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvcover.faults.kinds import FaultKind, FaultSyntaxError, printable
from kvcover.faults.read import UnfitJson, leaves, plain_json_start, too_deep, unicode

LegName = Literal["prefill", "decode"]
LEGS: tuple[LegName, LegName] = ("prefill", "decode")
_MOST = 10**18  # what a peer reads into 64 bits


_WHERE = "[@LEG][#REQUEST[+]]"
KEY_KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("drop", f"drop:KEY{_WHERE}", "params", "the key is missing", "vllm#47764, router#192"),
        FaultKind("set", f"set:KEY=JSON{_WHERE}", "params", "the key has another value (any JSON)",
                  "ray#63951, router 0.1.15"),
        FaultKind("rename", f"rename:KEY=NEW{_WHERE}", "params", "the value is sent under another name",
                  "vllm#46332, vllm#47764"),
        FaultKind("swap", f"swap:KEY{_WHERE}", "params", "the key has the value that the other leg was to have",
                  "vllm#41211, llm-d-router#1564"),
        FaultKind("stale", f"stale:KEY{_WHERE}", "params", "the key has the value of the request before, on the same leg",
                  "vllm#52234, vllm#51681"),
    )
}  # fmt: skip


class KeyFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that goes wrong with one key. `leg` None means both legs.

    It acts on the numbered `requests` and on every one from `since` on; without either, on all.
    """

    kind: Literal["drop", "set", "rename", "swap", "stale"]
    key: str
    value: Any = None
    new: str | None = None
    leg: LegName | None = None
    requests: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] | None = None
    since: Annotated[int, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        for field, name in (("key", self.key), ("new", self.new)):
            if name is not None and not printable(name):
                raise FaultSyntaxError(f"{name!r} is no key; it must not be empty nor hold @, # or =", field)
        if self.kind == "rename" and self.new is None:
            raise FaultSyntaxError("kind 'rename' needs `new`, the name under which the value is sent", "new")
        if self.kind != "rename" and self.new is not None:
            raise FaultSyntaxError(f"{self.new!r} is not needed: `new` goes with kind 'rename' only", "new")
        if self.new == self.key:
            raise FaultSyntaxError(f"{self.new!r} is the key itself; give it another name", "new")
        if self.kind != "set" and self.value is not None:
            raise FaultSyntaxError(f"{self.value!r} is not needed: `value` goes with kind 'set' only", "value")
        if self.requests is not None and len(set(self.requests)) < len(self.requests):
            raise FaultSyntaxError(f"{list(self.requests)} names a request twice; name each once", "requests")
        if self.since is not None and (twice := [request for request in self.requests or () if request >= self.since]):
            raise FaultSyntaxError(f"#{twice[0]} is among #{self.since}+, all from {self.since} on; leave out one of them", "since")
        if problem := _unfit(self.value):
            raise FaultSyntaxError(problem, "value")

    def __str__(self) -> str:
        value = {"set": f"={json.dumps(self.value)}", "rename": f"={self.new}"}.get(self.kind, "")
        leg = f"@{self.leg}" if self.leg else ""
        requests = "".join(f"#{i}" for i in self.requests or ())
        since = f"#{self.since}+" if self.since is not None else ""
        return f"{self.kind}:{self.key}{value}{leg}{requests}{since}"

    def aims_at(self, leg: str, request: int) -> bool:
        if self.leg not in (None, leg):
            return False
        if self.requests is None and self.since is None:
            return True
        return request in (self.requests or ()) or (self.since is not None and request >= self.since)

    def rewrite(self, params: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], bool]:
        """The dictionary after the fault, and whether the fault changed anything (else it did not fire).

        `source` is the dictionary from which `swap` and `stale` take their value, or its absence; None: there is none.
        """
        after = dict(params)
        if self.kind == "set":
            after[self.key] = self.value
        elif self.kind in ("swap", "stale"):
            if source is not None and self.key in source:
                after[self.key] = source[self.key]
            elif source is not None:
                after.pop(self.key, None)
        elif self.key in after:
            value = after.pop(self.key)
            if self.new is not None:
                after[self.new] = value
        return after, not _same(after, params)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equal as JSON: 1 and true are equal in Python, but not to the code that reads them."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


class Legs(NamedTuple):
    """What the router wrote, before any fault: this leg, the request's other leg, this leg of the request before.

    In READ decode's leg is made from prefill's answer, so for the prefill leg `other` is what decode would be sent without
    an answer. `previous` is None where it isn't written yet, and for request 0.
    """

    own: Mapping[str, Any]
    other: Mapping[str, Any]
    previous: Mapping[str, Any] | None = None


def apply_faults(faults: Iterable[KeyFault], legs: Legs, leg: str, request: int) -> tuple[dict[str, Any], list[int]]:
    """Rewrite one leg's dictionary with every fault aimed at it, in order; returns it and which faults fired."""
    after, fired = dict(legs.own), []
    for position, fault in enumerate(faults):
        if fault.aims_at(leg, request):
            after, changed = fault.rewrite(after, legs.previous if fault.kind == "stale" else legs.other)
            if changed:
                fired.append(position)
    return after, fired


def _unfit(value: Any) -> str:
    """Why a value can't be sent as JSON; empty if it can."""
    if too_deep(value):
        return "the value is nested too deeply; use a simpler one"
    for leaf in leaves(value):
        if isinstance(leaf, str):
            if not unicode(leaf):
                return f"{leaf!r} is not text; use Unicode characters"
        elif isinstance(leaf, float):
            if not math.isfinite(leaf):
                return f"{json.dumps(leaf)} is not JSON; use a finite number, or null"
        elif isinstance(leaf, int):
            if abs(leaf) >= _MOST:
                return f"{leaf} is too long a number; use at most 18 digits"
        elif leaf is not None:
            return f"{leaf!s} is not JSON; use a number, text in quotes, true, false, null, a list or a table"
    return ""


def parse_key_fault(text: str) -> KeyFault:
    """Read a shorthand such as `drop:remote_tp_size@prefill` or `set:remote_tp_size=1@decode#0`.

    Raises FaultSyntaxError with the nearest right form.
    """
    kind, _, rest = text.partition(":")
    syntax = KEY_KINDS[kind].syntax
    body = re.match(r"[^@#=]*", rest)
    key, rest = (body[0], rest[body.end() :]) if body else ("", rest)
    fields: dict[str, Any] = {"kind": kind, "key": key}
    if kind == "set" and rest.startswith("="):
        fields["value"], rest = _value(text, rest[1:])
    elif kind == "rename" and (new := re.match(r"=([^@#=]+)", rest)):
        fields["new"], rest = new[1], rest[new.end() :]
    if not key or rest.startswith("=") or len(fields) != (3 if kind in ("set", "rename") else 2):
        raise FaultSyntaxError(f"can't read {text!r}; use {syntax}")
    return KeyFault(**fields, **_target(text, rest, syntax))


def _value(text: str, rest: str) -> tuple[Any, str]:
    """The JSON that `rest` starts with, and what follows it."""
    rest = rest.strip()
    try:
        value, end = plain_json_start(rest)
    except json.JSONDecodeError:
        word = re.sub(r"@[^@#]*$|(@[^@#]*)?(#[0-9]+\+?)+$", "", rest)
        raise FaultSyntaxError(f"{word!r} in {text!r} is not JSON; a string needs quotes: {json.dumps(word)}") from None
    except UnfitJson as error:
        raise FaultSyntaxError(f"the value in {text!r} {error}; use a simpler one") from None
    after = rest[end:].lstrip()
    if after and after[0] not in "@#":
        raise FaultSyntaxError(f"{rest!r} in {text!r} is not JSON; a string needs quotes: {json.dumps(rest)}")
    return value, after


def _target(text: str, suffix: str, syntax: str) -> dict[str, Any]:
    """`@LEG#0#2+`: which leg, which requests, and from which on all of them."""
    parts = re.fullmatch(r"(?:@([^@#]*))?((?:#[^@#]*)*)", suffix)
    if parts is None:
        raise FaultSyntaxError(f"can't read {suffix!r} in {text!r}; use {syntax}")
    leg, requests = parts[1], parts[2].split("#")[1:]
    if leg is not None and leg not in LEGS:
        close = difflib.get_close_matches(leg.lower(), LEGS, n=1, cutoff=0.3)
        raise FaultSyntaxError(f"no leg {leg!r} in {text!r}; use @{close[0] if close else 'prefill or @decode'}")
    for part in requests:
        if not re.fullmatch(r"[0-9]{1,9}\+?", part):
            hint = "write #REQUEST as a number such as #0, or #2+ for all from 2 on"
            raise FaultSyntaxError(f"{part!r} in {text!r} is no request; {hint}")
    since = [int(part[:-1]) for part in requests if part.endswith("+")]
    if len(since) > 1:
        raise FaultSyntaxError(f"{text!r} says twice from which request on; write #{min(since)}+ alone")
    named = tuple(int(part) for part in requests if not part.endswith("+"))
    return {"leg": leg, "requests": named or None, "since": since[0] if since else None}
