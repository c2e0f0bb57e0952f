"""Recordings as they are kept, in the form of `tests/data/router_legs.toml`: one table a leg, and one a choice among instances."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcover.real_backend.driver.trial import ROLES, Role
from kvcover.real_backend.router.record import Exchange

_HEX = re.compile(r"[0-9a-f]{32}$")


def leg_tables(router: str, exchanges: Sequence[Exchange], date: str, options: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Each leg with what it answers to; ids that are one request's own are masked."""
    for each in exchanges:
        if each.shape.odd:  # stubs that lied: for templates only
            continue
        transfer_id = (each.prefill.params or {}).get("transfer_id")
        for role in ROLES:
            yield _table(router, each, role, transfer_id) | ({"options": list(options)} if options else {}) | {
                "date": date, "origin": "recorded from the real program on loopback",
            }  # fmt: skip


def _table(router: str, each: Exchange, role: Role, transfer_id: Any) -> dict[str, Any]:
    leg, shape = each.leg(role), each.shape
    table: dict[str, Any] = {"router": router, "mode": shape.mode, "side": role}
    for side in ROLES:
        tp, dp = shape.size(side)
        table[side] = {"tp": tp, "dp": dp}
    if each.ask.chat or each.ask.stream:
        table["asked"] = ("chat" if each.ask.chat else "completions") + (", streamed" if each.ask.stream else "")
    if role == "decode" and each.prefill.reply is not None:
        table |= {"engine_releases": [shape.release], "prefill_reply": _masked(each.prefill.reply, transfer_id)}
    headers = {name: _HEX.sub("<hex32>", value) for name, value in leg.headers.items()}
    return table | {"headers": headers, "request": leg.request, "params": _masked(leg.params or {}, transfer_id)}


def _masked(params: Mapping[str, Any], transfer_id: Any) -> str:
    return json.dumps({key: "<transfer_id>" if value == transfer_id else value for key, value in params.items()}, sort_keys=True)


def choice_table(
    router: str, exchanges: Sequence[Exchange], order: Sequence[str], date: str, options: Sequence[str]
) -> dict[str, Any]:
    """Which slots requests went to, in order; see `choices.Choices`."""
    shape = exchanges[0].shape
    sizes: dict[str, Any] = {
        side: {"tp": shape.size(side)[0], "dp": shape.size(side)[1], "instances": shape.instances} for side in ROLES
    }
    more = {"options": list(options)} if options else {}
    return {"router": router, "mode": shape.mode, **sizes, **more, "order": list(order), "date": date}


def as_toml(name: str, tables: Sequence[Mapping[str, Any]]) -> str:
    """Tables of one name as TOML."""
    parts = ["\n".join([f"[[{name}]]", *(f"{key} = {_value(value)}" for key, value in table.items())]) for table in tables]
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)  # it has no null
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return f"'{value}'" if isinstance(value, str) and value.startswith("{") and "'" not in value else json.dumps(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
