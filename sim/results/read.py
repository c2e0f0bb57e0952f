"""Results from files, read as strictly as scenarios: what an editor or another program made of them is never a traceback.

`.json` holds one result or an array of them, `.jsonl` (and anything else) one a line; reading takes each for the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults.read import UnfitJson, leaves, plain_json
from kvcover.sim.errors import InputError, short
from kvcover.sim.files import MB, read_text
from kvcover.sim.results.result import OUTCOMES, RESULT_SCHEMA, Result

_MOST = 256 * MB
_SIDES = ("before", "after")
_HINT = "give a file that `kvcover run -o FILE` or `kvcover matrix -o FILE` wrote"


def results_text(path: str | None, rows: Iterable[str]) -> str:
    """Results, each a line of JSON, as `path` is to hold them: an array if its name ends in `.json`, else one a line."""
    lines = list(rows)
    if path is not None and path.endswith(".json"):
        return "[" + ",\n".join(lines) + "]\n"
    return "".join(line + "\n" for line in lines)


def read_result(place: str) -> Result:
    """The one result that a place names: a file that holds one, or one of several as read_rows says.

    >>> read_result("no-such.json")
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: no-such.json: can't be read: No such file or directory; give a file that `kvcover run -o FILE` or `kvcover matrix -o FILE` wrote
    """  # noqa: E501
    rows = read_rows(place)
    if len(rows) > 1:
        sides = all("confirmation" in row for row in rows)
        choice = f"{place}:before or {place}:after" if sides else f"one of {place}:1 to {place}:{len(rows)}"
        raise InputError(place, f"holds {len(rows)} results", f"give {choice}")
    return result_of(rows[0], place)


def read_results(path: str | Path) -> list[Result]:
    """Every result in a file that --json or -o wrote, in order; at least one. Raises InputError for what is none.

    >>> read_results("no-such.json")
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: no-such.json: can't be read: No such file or directory; give a file that `kvcover run -o FILE` or `kvcover matrix -o FILE` wrote
    """  # noqa: E501
    rows = read_rows(path)
    return [result_of(row, f"{path}" if len(rows) == 1 else f"{path}: result {number}") for number, row in enumerate(rows, 1)]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Every result in a file as plain data: one, an array of them, one a line, or the two sides of a confirmation.

    `FILE:3` is the third alone, `FILE:before` and `FILE:after` are the sides; `-` is standard input.
    """
    file, pick = _pick(str(path))
    rows = [row for each in _objects(file) for row in sides_of(each, file)]
    if pick is None:
        return rows
    names = [row.get("confirmation", str(number)) for number, row in enumerate(rows, 1)]
    if pick not in names:
        raise InputError(str(path), f"has no result {pick!r}", f"{file} has {names[0]} to {names[-1]}" if rows else _HINT)
    return [rows[names.index(pick)]]


def read_objects(path: str | Path) -> list[dict[str, Any]]:
    """Every JSON object in a file that any command's `--json` or `-o` wrote, as it is; of FILE:3 that result alone."""
    file, pick = _pick(str(path))
    return _objects(file) if pick is None else read_rows(path)


def _objects(file: str) -> list[dict[str, Any]]:
    """The objects in a file: one, an array of them, or one a line; at least one."""
    text = read_text(file, _MOST, _HINT)
    found = _one_document(text, file)
    if found is None:
        found = [_line(line, f"{file}: line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise InputError(file, "holds no result", _HINT)
    if (odd := next((each for each in found if not isinstance(each, dict)), found)) is not found:
        raise InputError(file, f"{short(odd)} is no result of kvcover", _HINT)
    return found


def _pick(place: str) -> tuple[str, str | None]:
    """A file and which of its results; a file whose own name ends so is taken as it is."""
    file, colon, pick = place.rpartition(":")
    chosen = bool(colon and file) and (pick in _SIDES or (pick.isascii() and pick.isdecimal()))
    return (file, pick.lstrip("0")) if chosen and not os.path.exists(place) else (place, None)


def sides_of(found: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The results in one JSON object: itself, or the two of a confirmation, each with its name in `confirmation`."""
    if found.get("kind") != "confirmation":
        return [found]
    rows = []
    for name in _SIDES:
        side = found.get(name)
        row = side.get("result") if isinstance(side, dict) else None
        if not isinstance(row, dict):
            raise InputError(place, f"is a confirmation without the result of {name}", _HINT)
        rows.append(row | {"confirmation": name})
    return rows


def _one_document(text: str, place: str) -> list[Any] | None:
    """What lies in a file that is one JSON value; None if it is more, or none."""
    try:
        found = plain_json(text)
    except UnfitJson as error:
        raise InputError(place, str(error), _HINT) from None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else [found]


def _line(line: str, place: str) -> Any:
    try:
        return plain_json(line)
    except UnfitJson as error:
        raise InputError(place, str(error), _HINT) from None
    except (ValueError, RecursionError):
        raise InputError(place, "is not JSON, or cut off", _HINT) from None


def result_of(row: Any, place: str) -> Result:
    """Plain data as a result. Raises InputError for another schema, and for fields that are missing or hold what they may not."""
    if isinstance(row, dict) and "error" in row:
        raise InputError(place, f"holds no result, but why there is none: {short(row['error'])}", "run it again")
    if not isinstance(row, dict) or not {"schema", "outcome", "coverage"} <= set(row):
        raise InputError(place, "is no result of kvcover", _HINT)
    if row["schema"] != RESULT_SCHEMA:
        raise InputError(place, f"has schema {short(row['schema'])}", f"this kvcover reads schema {RESULT_SCHEMA}")
    if odd := next((leaf for leaf in leaves(row) if isinstance(leaf, float) and not math.isfinite(leaf)), None):
        raise InputError(place, f"holds {odd}, which is no number", _HINT)
    try:
        result = msgspec.convert(row, Result, strict=True)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:  # halves of characters are no text
        raise InputError(place, f"is no result of kvcover: {error}", _HINT) from None
    _check_sense(result, place)
    return result


def _check_sense(result: Result, place: str) -> None:
    """What types can't say: outcomes are known words, shares lie between 0 and 1, engines have sizes."""
    for outcome in (result.outcome, *result.by_request):
        if outcome not in (*OUTCOMES, "vacuous"):
            raise InputError(f"{place}: outcome", f"{short(outcome)} is none", f"one of {', '.join(OUTCOMES)} or vacuous is")
    if not result.by_request or not result.by_rank:
        raise InputError(place, "is of no request, or of no decode rank", _HINT)
    ranks = [
        share
        for rank in result.by_rank
        for share in (rank.coverage, rank.wrong, rank.missing, rank.coverage_end, *(rank.by_layer or ()))
    ]
    for share in (result.coverage, result.coverage_end, result.wrong, *ranks):
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"{place}: coverage", f"{share:g} is no share of the cells", "it lies between 0 and 1")
    for name, size in (("prefill", result.prefill), ("decode", result.decode)):
        if not {"tp", "dp"} <= set(size):
            raise InputError(f"{place}: {name}", f"{short(size)} has no tp and dp", _HINT)
