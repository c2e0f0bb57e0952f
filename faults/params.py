"""Key faults: what can go wrong with the dictionary `kv_transfer_params` on its way from the router to an engine.

Point `params`: a leg's dictionary leaves the router. The missing key that started this project is
`drop:remote_tp_size@prefill`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from faults.kinds import FaultKind, FaultSyntaxError

Leg = Literal["prefill", "decode"]
LEGS: tuple[Leg, Leg] = ("prefill", "decode")


KEY_KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind(
            "drop", "drop:KEY[@LEG][#REQUEST]", "params", ("model", "connector"),
            "the key is missing", "vllm#47764, router#192",
        ),
        FaultKind(
            "set", "set:KEY=JSON[@LEG][#REQUEST]", "params", ("model", "connector"),
            "the key has another value (any JSON)", "ray#63951, router 0.1.15",
        ),
        FaultKind(
            "rename", "rename:KEY=NEW[@LEG][#REQUEST]", "params", ("model", "connector"),
            "the value is sent under another name", "vllm#46332, vllm#47764",
        ),
    )
}  # fmt: skip


class KeyFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Drop, set or rename one key. `leg` None means both legs; `requests` None means every request."""

    kind: Literal["drop", "set", "rename"]
    key: str
    value: Any = None
    new: str | None = None
    leg: Leg | None = None
    requests: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("key must not be empty")
        if (self.kind == "rename") != (self.new is not None):
            raise ValueError("`new` goes with kind `rename`, and only with it")
        if self.new == "":
            raise ValueError("new must not be empty")
        if self.kind != "set" and self.value is not None:
            raise ValueError("`value` goes with kind `set` only")

    def __str__(self) -> str:
        body = {
            "drop": self.key,
            "set": f"{self.key}={json.dumps(self.value)}",
            "rename": f"{self.key}={self.new}",
        }[self.kind]
        leg = f"@{self.leg}" if self.leg else ""
        requests = "".join(f"#{i}" for i in self.requests) if self.requests is not None else ""
        return f"{self.kind}:{body}{leg}{requests}"

    def aims_at(self, leg: str, request: int) -> bool:
        return self.leg in (None, leg) and (self.requests is None or request in self.requests)

    def rewrite(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The dictionary after the fault, and whether the fault changed anything (else it did not fire)."""
        after = dict(params)
        if self.kind == "set":
            after[self.key] = self.value
        elif self.key in after:
            value = after.pop(self.key)
            if self.new is not None:
                after[self.new] = value
        return after, not _same(after, params)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equal as JSON: 1 and true are equal in Python, but not to the code that reads them."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def apply_faults(faults: Iterable[KeyFault], params: Mapping[str, Any], leg: str, request: int) -> tuple[dict[str, Any], list[int]]:
    """Rewrite one leg's dictionary with every fault aimed at it, in order; returns it and which faults fired."""
    after, fired = dict(params), []
    for position, fault in enumerate(faults):
        if fault.aims_at(leg, request):
            after, changed = fault.rewrite(after)
            if changed:
                fired.append(position)
    return after, fired


def parse_key_fault(text: str) -> KeyFault:
    """Read a shorthand such as `drop:remote_tp_size@prefill` or `set:remote_tp_size=1@decode#0`.

    Raises FaultSyntaxError with the nearest right form.
    """
    kind, _, rest = text.partition(":")
    body, leg, requests = _split_target(text, rest)
    key, equals, value = body.partition("=")
    if not key or (kind == "drop") == bool(equals) or (kind == "rename" and not value):
        raise FaultSyntaxError(f"can't read {text!r}; use {KEY_KINDS[kind].syntax}")
    if kind == "set":
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            raise FaultSyntaxError(f"{value!r} in {text!r} is not JSON; a string needs quotes: {json.dumps(value)}") from None
        return KeyFault(kind="set", key=key, value=parsed, leg=leg, requests=requests)
    if kind == "rename":
        return KeyFault(kind="rename", key=key, new=value, leg=leg, requests=requests)
    return KeyFault(kind="drop", key=key, leg=leg, requests=requests)


def _split_target(text: str, rest: str) -> tuple[str, Leg | None, tuple[int, ...] | None]:
    """Split `BODY@LEG#0#2`; the last `@` counts, as a JSON string may hold one, and so must look like a leg."""
    head, hashed, tail = _cut_requests(rest)
    requests = tuple(int(part) for part in tail.split("#")) if hashed else None
    body, at, leg = head.rpartition("@")
    if not at or '"' in leg:
        return head, None, requests
    for name in LEGS:
        if leg == name:
            return body, name, requests
    close = difflib.get_close_matches(leg, LEGS, n=1, cutoff=0.3)
    raise FaultSyntaxError(f"no leg {leg!r} in {text!r}; use @{close[0] if close else 'prefill or @decode'}")


def _cut_requests(rest: str) -> tuple[str, bool, str]:
    head, hashed, tail = rest.partition("#")
    if hashed and all(part.isdecimal() for part in tail.split("#")):
        return head, True, tail
    return rest, False, ""
