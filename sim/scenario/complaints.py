"""What is wrong with data that is to become structs, in the words of those who write scenarios.

Nothing here knows a scenario: a complaint names the place, the value and the nearest right one.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvcover.faults.read import too_deep, unicode
from kvcover.sim.errors import InputError, nearest, short

EXAMPLES = {
    "prefill": "{tp = 4}", "decode": "{tp = 4}", "timers": "{defer_timeout_s = 5}", "timing": "{message_ns = 50000}",
    "workload": "{concurrency = 4}", "rdma": "{queue_pairs = 1}", "overrides": '{ports = "dp_plus_tp"}',
    "expect": '{outcome = "ok"}', "faults": '["drop:remote_tp_size"]', "requests": "4 or [{prompt_tokens = 32}]",
    "fabric": '"cx7" or {write_fixed_ns = 5850, write_gb_per_s = 48.8, read_fixed_ns = 6550, read_gb_per_s = 43.9}',
    "prefill.host": "10.0.0.1", "decode.host": "10.0.0.2", "requests[]": "{prompt_tokens = 32}",
    "faults[]": '"drop:remote_tp_size"', "faults[].requests": "[0], or leave it out",
}  # fmt: skip


def check_plain(value: Any, place: str) -> None:
    """Raise InputError for what no field can hold: text that is not Unicode, endless digits, endless nesting."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InputError(place or "scenario", f"{short(key)} is no name of a field", "use text")
            if too_deep(dict(inner) if isinstance(inner, Mapping) else inner):
                raise InputError(join(place, key), f"{short(inner)} is nested too deeply", "use plain values, lists and tables")
            check_plain(key, place or "scenario")
            check_plain(inner, join(place, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            check_plain(inner, f"{place}[{index}]")
    elif isinstance(value, str) and not unicode(value):
        raise InputError(place, f"{short(value)} is not text", "use Unicode characters, in UTF-8")
    elif isinstance(value, int) and abs(value) >= 10**30:
        raise InputError(place, "a number of more than 30 digits", "use a smaller one")


def join(place: str, key: object) -> str:
    """The place of a field; keys that are no names are quoted."""
    name = key if isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else short(key)
    return f"{place}.{name}" if place else str(name)


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a struct by the names that people write, with their types."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct type in `X`, `X | None`, `tuple[X, ...]` or `Annotated[X, …]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    for inner in typing.get_args(annotation):
        found = struct_in(inner)
        if found is not None:
            return found
    return None


def in_tables(value: Any, struct: type[msgspec.Struct] | None, place: str) -> Any:
    """What a struct of this type, which lies at `place`, would be as plain data; raises InputError if another is in its place."""
    if struct is not None and isinstance(value, struct):
        fields = msgspec.structs.fields(struct)
        return {f.encode_name: in_tables(getattr(value, f.name), struct_in(f.type), join(place, f.encode_name)) for f in fields}
    if struct is not None and isinstance(value, (list, tuple)):
        return [in_tables(item, struct, f"{place}[{index}]") for index, item in enumerate(value)]
    if struct is not None and isinstance(value, (Mapping, msgspec.Struct)):
        name, inside = struct.__name__, value.items() if isinstance(value, Mapping) else ()
        right = f"{name}({', '.join(f'{key}={inner!r}' for key, inner in inside)})"
        right = right if len(right) <= 60 else f"{name}(...)"
        raise InputError(place or "scenario", f"{short(value)} is no {name}", f"write {right}, or give all of it to build()")
    return value


def reject_unknown(struct: type[msgspec.Struct], data: Any, place: str) -> None:
    """Raise InputError for a field, however deep, that its struct doesn't have."""
    if isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            reject_unknown(struct, item, f"{place}[{index}]")
    if not isinstance(data, Mapping):
        return
    fields = fields_of(struct)
    for key, value in data.items():
        reject_name(key, value, list(fields), place)
        inner = struct_in(fields[key])
        if inner is not None:
            reject_unknown(inner, value, join(place, key))


def reject_name(key: Any, value: Any, names: list[str], place: str) -> None:
    """Raise InputError for a field at `place` that is none of `names`."""
    if key not in names:
        raise InputError(join(place, key), f"no such field (its value is {short(value)})", nearest(str(key), names))


_AT = re.compile(r" - at `\$(.*)`$")
_EXPECTED = re.compile(r"Expected `([^`]*)`(?:, got `[^`]*`)?(.*)", re.DOTALL)
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "object": "a table",
          "array": "a list"}  # fmt: skip


def explain(error: msgspec.ValidationError, data: Any, struct: type[msgspec.Struct], place: str) -> InputError:
    """msgspec's complaint about `data`, which lies at `place`, in the words of those who write scenarios."""
    text = str(error)
    match = _AT.search(text)
    path, problem = (match[1].lstrip("."), text[: match.start()]) if match else ("", text)
    if path.endswith("[...]"):  # msgspec names no key of a dictionary; only `overrides` is one
        path = path.removesuffix("[...]")
        path += "." + next(key for key, value in _value_at(data, path).items() if not isinstance(value, str))
    value, where = short(_value_at(data, path)), ".".join(part for part in (place, path) if part) or "scenario"
    if choices := _choices_at(struct, path):
        hint = nearest(_value_at(data, path), choices) if isinstance(_value_at(data, path), str) else "use " + " or ".join(choices)
        return InputError(where, f"{value} is not one of its values", hint)
    return InputError(where, f"{value} is wrong", _in_words(problem, re.sub(r"\[[0-9]+\]", "[]", where)))


def _in_words(problem: str, where: str) -> str:
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"it has no field {missing[1]!r}, which it needs"
    match = _EXPECTED.fullmatch(problem)
    if match is None:
        return problem[0].lower() + problem[1:].replace("`", "")
    kinds, rest = [kind for kind in match[1].split(" | ") if kind != "null"], match[2]
    if "matching regex" in rest:
        rest = " without spaces"
    example = EXAMPLES.get(where)
    return f"expected {' or '.join(_WORDS.get(kind, kind) for kind in kinds)}{rest}" + (f", such as {example}" if example else "")


def _value_at(data: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            data = data[int(part)] if isinstance(data, (list, tuple)) else data[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return data
    return data


def _choices_at(struct: type[msgspec.Struct], path: str) -> list[str]:
    """The values of the Literal at a path, as text."""
    annotation: Any = struct
    for part in re.findall(r"[^.\[\]]+", path):
        if not part.isdecimal():
            inner = struct_in(annotation)
            annotation = fields_of(inner).get(part) if inner else None
    return _literals(annotation)


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [choice for inner in typing.get_args(annotation) for choice in _literals(inner)]
    return []
