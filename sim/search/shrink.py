"""Shrinking: from a scenario that shows a finding to the smallest one that still does.

`shrink` is greedy and deterministic: it takes the first reduction that keeps the finding, biggest steps first, until none
does. So its answer is 1-minimal: no single one of `reductions` keeps the finding.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvcover.faults import FaultSyntaxError, parse_fault
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.cache.presets import resolve_model
from kvcover.sim.errors import InputError
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, build
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.simulate import run_world

Draft = dict[str, Any]
Shrunk = tuple[str, str]
# Fields with a rule of their own, or that say what the finding is about and so stay.
_KEPT = ("schema", "release", "mode", "model", "prompt_tokens", "requests", "faults", "expect")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Scenario)}


def finding_of(result: Result) -> Shrunk:
    """What a result says: its outcome, and the kind of its first finding or else the first check that failed."""
    kinds = [finding.kind for finding in result.findings] + [check.name for check in result.checks if check.verdict == "fail"]
    return result.outcome, kinds[0] if kinds else ""


def find_once(draft: Mapping[str, Any]) -> Shrunk | None:
    """Run a draft and say what it finds; None for a draft that makes no sense."""
    try:
        scenario = msgspec.convert(draft, Scenario, strict=True)
        return finding_of(run_world(resolve(scenario))[0])
    except (InputError, msgspec.ValidationError):
        return None
    except Exception as error:  # the model itself failed, and that is a finding too
        return "error", type(error).__name__


def shrink(draft: Mapping[str, Any], same: Callable[[Draft], bool] | None = None) -> Draft:
    """The smallest draft on the way for which `same` holds; without `same`: that finds what `draft` finds.

    Raises InputError for a draft that makes no sense.
    """
    best = copy.deepcopy({name: value for name, value in draft.items() if name != "expect"})
    goal = find_once(best)
    if goal is None and same is None:
        resolve(build(best))  # says what is wrong with it
    keeps = same or _finds(goal)
    failed: set[str] = set()
    found = True
    while found:
        found = False
        for rule in RULES.values():
            while (smaller := _first(rule, best, keeps, failed)) is not None:
                best, found = smaller, True
    return best


def _finds(goal: Shrunk | None) -> Callable[[Draft], bool]:
    return lambda draft: find_once(draft) == goal


def _first(rule: Callable[[Draft], Iterator[Draft]], draft: Draft, same: Callable[[Draft], bool], failed: set[str]) -> Draft | None:
    """The first reduction of a rule that keeps the finding; `failed` remembers those that don't."""
    for smaller in rule(draft):
        text = json.dumps(smaller, sort_keys=True)
        if text in failed:
            continue
        if same(smaller):
            return smaller
        failed.add(text)
    return None


def reductions(draft: Draft) -> Iterator[tuple[str, Draft]]:
    """Every single reduction of a draft, with the name of its rule."""
    for name, rule in RULES.items():
        for smaller in rule(draft):
            yield name, smaller


def _with(draft: Draft, path: str, value: Any) -> Draft:
    """A copy with another value at `a.b`; None removes it, and a table that this leaves empty."""
    changed = copy.deepcopy(draft)
    table, _, name = path.rpartition(".")
    inner = changed.setdefault(table, {}) if table else changed
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    if table and not inner:
        del changed[table]
    return changed


def _lower(number: int, least: int = 1) -> list[int]:
    """Smaller numbers, the smallest first; then ever shorter steps down to one."""
    if number <= least:
        return []
    step, lower = number - least, [least]
    while step > 1:
        step //= 2
        lower.append(number - step)
    return list(dict.fromkeys(lower))


# -- the rules ---------------------------------------------------------------------------------------------------


def _shrink_model(draft: Draft) -> Iterator[Draft]:
    """Fewer layers, fewer heads, smaller heads; a preset becomes its numbers."""
    try:
        geometry = resolve_model(draft.get("model", _DEFAULTS["model"]))
    except InputError:
        return
    if geometry.window or geometry.minor is not None:  # first a model whose layers are all alike
        yield from (_with(draft, "model", _model_text(kind)) for kind in geometry.kinds)
        return
    for field in ("layers", "kv_heads", "head_dim"):
        for value in _lower(getattr(geometry, field)):
            yield _with(draft, "model", _model_text(msgspec.structs.replace(geometry, **{field: value})))


def _model_text(geometry: Geometry) -> str:
    if geometry.mla:
        return f"layers={geometry.layers},mla={geometry.head_dim}"
    return f"layers={geometry.layers},kv_heads={geometry.kv_heads},head_dim={geometry.head_dim}"


def _shrink_prompt(draft: Draft) -> Iterator[Draft]:
    """Fewer blocks, then fewer tokens."""
    size, tokens = draft.get("block_size", _DEFAULTS["block_size"]), draft.get("prompt_tokens", _DEFAULTS["prompt_tokens"])
    for blocks in _lower(-(-tokens // size)):
        yield _with(draft, "prompt_tokens", blocks * size)
    for fewer in _lower(tokens):
        yield _with(draft, "prompt_tokens", fewer)


def _shrink_requests(draft: Draft) -> Iterator[Draft]:
    """Fewer requests; each with nothing said about it."""
    requests = draft.get("requests")
    if requests is None:
        return
    if not isinstance(requests, list):
        for count in _lower(requests):
            yield from _without_requests(draft, range(count, requests), count)
        yield _with(draft, "requests", None)
        return
    for index in range(len(requests) if len(requests) > 1 else 0):
        yield from _without_requests(draft, range(index, index + 1), requests[:index] + requests[index + 1 :])
    if not any(requests):
        yield _with(draft, "requests", len(requests))
    for index, spec in enumerate(requests):
        for name in spec:
            fewer = [{k: v for k, v in spec.items() if k != name} if i == index else other for i, other in enumerate(requests)]
            yield _with(draft, "requests", fewer)


def _without_requests(draft: Draft, gone: range, left: Any) -> Iterator[Draft]:
    """Drop requests, and say in the faults which number each of the others has now."""
    faults = [_renumbered(text, gone) for text in draft.get("faults", ())]
    kept = [text for text in faults if text is not None]
    smaller = _with(draft, "requests", left)
    yield _with(smaller, "faults", kept or None)


def _renumbered(text: Any, gone: range) -> Any:
    """The fault when requests `gone` are gone; None if it aimed only at them."""

    def now(request: int) -> int | None:
        return None if request in gone else request - len(gone) if request >= gone.stop else request

    fault = _parsed(text)
    changes: dict[str, Any] = {}
    if getattr(fault, "requests", None) is not None:
        changes["requests"] = tuple(n for r in fault.requests if (n := now(r)) is not None)
    if getattr(fault, "since", None) is not None:
        changes["since"] = fault.since - len([r for r in gone if r < fault.since])
        if changes.get("requests") == ():
            changes["requests"] = None
    if getattr(fault, "request", None) is not None:
        changes["request"] = now(fault.request)
    if getattr(fault, "target", "").isdecimal():
        changes["target"] = "" if (n := now(int(fault.target))) is None else str(n)
    if changes.get("requests") == () or ("request" in changes and changes["request"] is None) or changes.get("target") == "":
        return None
    return str(msgspec.structs.replace(fault, **changes)) if changes else text


def _parsed(fault: Any) -> Any:
    """A fault as a struct; None when it can't be read or is not written as text."""
    try:
        return parse_fault(fault) if isinstance(fault, str) else None
    except FaultSyntaxError:
        return None


def _shrink_faults(draft: Draft) -> Iterator[Draft]:
    """Fewer faults; each aimed less narrowly (but for its leg, which says more than it costs)."""
    faults = draft.get("faults") or []
    for index in range(len(faults)):
        yield _with(draft, "faults", faults[:index] + faults[index + 1 :] or None)
    for index, text in enumerate(faults):
        for plainer in _plainer(_parsed(text)):
            yield _with(draft, "faults", [*faults[:index], plainer, *faults[index + 1 :]])


def _plainer(fault: Any) -> Iterator[str]:
    for field in msgspec.structs.fields(fault) if fault is not None else ():
        value = getattr(fault, field.name)
        if field.required or field.name in ("value", "new", "leg") or value == field.default:
            continue
        try:
            text = str(msgspec.structs.replace(fault, **{field.name: field.default}))
            parse_fault(text)
        except (ValueError, TypeError):
            continue  # this kind needs it
        yield text


def _shrink_sides(draft: Draft) -> Iterator[Draft]:
    """Fewer TP and DP ranks: on both sides, then on one."""
    for field in ("tp", "dp"):
        prefill, decode = (draft.get(side, {}).get(field, 1) for side in ("prefill", "decode"))
        for least in _lower(max(prefill, decode)):
            yield _resized(draft, field, min(prefill, least), min(decode, least))
        for side, size in (("prefill", prefill), ("decode", decode)):
            for value in _lower(size):
                yield _resized(draft, field, value if side == "prefill" else prefill, value if side == "decode" else decode)


def _shrink_halves(draft: Draft) -> Iterator[Draft]:
    """Half the TP ranks on both sides, which keeps their ratio."""
    sizes = [draft.get(side, {}).get("tp", 1) for side in ("prefill", "decode")]
    if all(size % 2 == 0 for size in sizes):
        yield _resized(draft, "tp", sizes[0] // 2, sizes[1] // 2)


def _resized(draft: Draft, field: str, prefill: int, decode: int) -> Draft:
    """With other sizes; 1 is the default and so not said."""
    smaller = _with(draft, f"prefill.{field}", prefill if prefill > 1 else None)
    return _with(smaller, f"decode.{field}", decode if decode > 1 else None)


def _shrink_fields(draft: Draft) -> Iterator[Draft]:
    """Every other field as if nobody had said anything."""
    for name, value in draft.items():
        if name in _KEPT:
            continue
        if name not in ("prefill", "decode") or not value:
            yield _with(draft, name, None)
        for inner in value if isinstance(value, dict) else ():
            if inner not in ("tp", "dp") or value[inner] == 1:
                yield _with(draft, f"{name}.{inner}", None)


RULES: dict[str, Callable[[Draft], Iterator[Draft]]] = {
    "model": _shrink_model,
    "prompt": _shrink_prompt,
    "requests": _shrink_requests,
    "faults": _shrink_faults,
    "halves": _shrink_halves,
    "sides": _shrink_sides,
    "fields": _shrink_fields,
}
