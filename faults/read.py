"""Numbers, JSON and TOML as people write them, and nothing else that Python would read as such.

`int` and `float` take `1_6`, `٤`, ` 4 ` and `nan`; `json` takes NaN, the last of two equal keys, and any depth.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_MOST_DIGITS = 30  # more than any limit that a number is compared with
_MOST_DEPTH = 32
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_LONG_KEY = re.compile(rf"(?:^[ \t]*\[{{0,2}}|[{{,])[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_MOST_DEPTH}}}", re.MULTILINE)


class UnfitJson(ValueError):
    """JSON or TOML by its grammar, but not to be used; the message says why. Other bad text raises `json.JSONDecodeError`."""


def plain_int(text: str) -> int:
    """A whole number in plain digits; raises ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def plain_float(text: str) -> float:
    """A number in plain digits, with a point and an exponent or without; raises ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def plain_json(text: str) -> Any:
    """A JSON value; raises `UnfitJson` for one that is too deep or long, or that gives a key twice."""
    value, end = plain_json_start(text.lstrip())
    if rest := text.lstrip()[end:].strip():
        raise json.JSONDecodeError("Extra data", text, text.rindex(rest))
    return value


def plain_json_start(text: str) -> tuple[Any, int]:
    """The JSON value that `text` starts with, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise UnfitJson("is nested too deeply") from None
    if too_deep(value):
        raise UnfitJson("is nested too deeply")
    return value, end


def plain_toml(text: str) -> dict[str, Any]:
    """A TOML document; raises `UnfitJson` for keys of so many parts that reading them takes all memory, other ValueErrors else."""
    if _LONG_KEY.search(text):
        raise UnfitJson("is nested too deeply")
    return tomllib.loads(text)


def too_deep(value: Any) -> bool:
    """Whether lists and tables lie in each other deeper than anyone needs, and than Python's own functions bear."""
    layer = [value]
    for _ in range(_MOST_DEPTH):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if not layer:
            return False
    return True


def leaves(value: Any) -> Iterator[Any]:
    """Every key and every value that is no list or table, of a value that is not `too_deep`."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, (dict, list, tuple)):
        for inner in _inside(value):
            yield from leaves(inner)
    else:
        yield value


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def unicode(text: str) -> bool:
    """Whether it can be written: bytes of the command line that are not UTF-8 become halves of characters in Python."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise UnfitJson(f"holds a number of {len(text)} digits")
    return int(text)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnfitJson(f"gives {twice!r} more than once")
    return table


_DECODER = json.JSONDecoder(parse_int=_whole, object_pairs_hook=_table)
