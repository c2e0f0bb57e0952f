"""Results from files, read as strictly as scenarios: what an editor or another program made of them is never a traceback.

`.json` holds one result or an array of them, `.jsonl` (and anything else) one a line; reading takes each for the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults.read import UnfitJson, plain_json
from kvcover.sim.errors import InputError, short
from kvcover.sim.files import MB, read_text
from kvcover.sim.results.result import OUTCOMES, RESULT_SCHEMA, Result

_MOST = 256 * MB
_HINT = "give a file that `kvcover run -o FILE` or `kvcover matrix -o FILE` wrote"


def results_text(path: str | None, rows: Iterable[str]) -> str:
    """Results, each a line of JSON, as `path` is to hold them: an array if its name ends in `.json`, else one a line."""
    lines = list(rows)
    if path is not None and path.endswith(".json"):
        return "[" + ",\n".join(lines) + "]\n"
    return "".join(line + "\n" for line in lines)


def read_results(path: str | Path) -> list[Result]:
    """Every result in a file, in order; at least one.

    >>> read_results("no-such.json")
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: no-such.json: can't be read: No such file or directory; give a file that `kvcover run -o FILE` or `kvcover matrix -o FILE` wrote
    """  # noqa: E501
    rows = read_rows(path)
    return [result_of(row, f"{path}" if len(rows) == 1 else f"{path}: result {number}") for number, row in enumerate(rows, 1)]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Every JSON object in a file: one, an array of them, or one a line."""
    text = read_text(path, _MOST, _HINT)
    rows = _one_document(text)
    if rows is None:
        rows = [_line(line, f"{path}: line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise InputError(str(path), "holds no result", _HINT)
    for row in rows:
        if not isinstance(row, dict):
            raise InputError(str(path), f"{short(row)} is no result of kvcover", _HINT)
    return rows


def _one_document(text: str) -> list[Any] | None:
    """What lies in a file that is one JSON value; None if it is more, or none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else [found]


def _line(line: str, place: str) -> Any:
    try:
        return plain_json(line)
    except UnfitJson as error:
        raise InputError(place, str(error), _HINT) from None
    except ValueError:
        raise InputError(place, "is not JSON", _HINT) from None


def result_of(row: Any, place: str) -> Result:
    """Plain data as a result. Raises InputError for another schema, and for fields that are missing or hold what they may not."""
    if not isinstance(row, dict) or not {"schema", "outcome", "coverage"} <= set(row):
        raise InputError(place, "is no result of kvcover", _HINT)
    if row["schema"] != RESULT_SCHEMA:
        raise InputError(place, f"has schema {short(row['schema'])}", f"this kvcover reads schema {RESULT_SCHEMA}")
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
    ranks = [share for rank in result.by_rank for share in (rank.coverage, rank.wrong, rank.missing)]
    for share in (result.coverage, result.coverage_end, result.wrong, *ranks):
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"{place}: coverage", f"{share:g} is no share of the cells", "it lies between 0 and 1")
    for name, size in (("prefill", result.prefill), ("decode", result.decode)):
        if not {"tp", "dp"} <= set(size):
            raise InputError(f"{place}: {name}", f"{short(size)} has no tp and dp", _HINT)
