"""Result files that an editor, a full disk or another program made: one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcover import InputError, build, run
from kvcover.sim.results.read import read_result
from tests.cli.test_verdicts import call

GOOD: dict[str, Any] = run(build({"model": "layers=1,mla=8", "prompt_tokens": 16, "faults": ["late-rank:D0,ms=3"]})).to_dict()
REQUIRED = ["tier", "release", "decode_release", "mode", "model", "router", "seed", "prefill", "decode", "outcome", "coverage",
            "coverage_end", "wrong", "stray", "by_rank", "by_request", "sets", "findings", "checks", "faults", "digest", "events",
            "virtual_ns", "seconds", "replay"]  # fmt: skip
ODD: list[Any] = [None, True, 7, -1, 1.5, "x", "\x1b[31m", [], [7], {}, {"x": 1}, [[]], [None], 10**30]
FREE = {"scenario", "backend"}  # tables of their own: what is wrong in one is said by what uses it


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a result but those inside of what is free."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        if path or key not in FREE:
            yield from paths(inner, (*path, key))


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    edited: dict[str, Any] = json.loads(json.dumps(GOOD))
    here: Any = edited
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return edited


def write(folder: Path, text: str, name: str = "edited.json") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(paths(GOOD))), st.sampled_from(ODD))
def test_an_edited_field_is_read_or_refused_in_one_line(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    good, edited = write(tmp_path, json.dumps(GOOD), "good.json"), write(tmp_path, json.dumps(put(path, value)))
    for words in (["why", edited], ["compare", edited, good], ["compare", good, edited, "--check"]):
        code, err = call(words)
        assert code in (0, 1, 2, 3)
        assert code != 2 or err.count("\n") == 1
        assert "\x1b" not in err


@pytest.mark.parametrize("field", REQUIRED)
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    text = json.dumps({name: value for name, value in GOOD.items() if name != field})
    with pytest.raises(InputError, match=f"`{field}`" if field not in ("outcome", "coverage") else "no result"):
        read_result(write(tmp_path, text))


BAD: dict[str, Callable[[str], str]] = {
    "empty": lambda good: "",
    "not JSON": lambda good: "coverage = 1",
    "cut off": lambda good: good[:-40],
    "an array of nothing": lambda good: "[]",
    "an array in an array": lambda good: f"[[{good}]]",
    "a number": lambda good: "7",
    "another schema": lambda good: json.dumps(GOOD | {"schema": 2}),
    "a schema of true": lambda good: json.dumps(GOOD | {"schema": True}),
    "NaN": lambda good: json.dumps(GOOD | {"seconds": float("nan")}),
    "an infinity": lambda good: json.dumps(GOOD | {"coverage": float("inf")}),
    "a share above one": lambda good: json.dumps(GOOD | {"coverage": 1.5}),
    "an unknown outcome": lambda good: json.dumps(GOOD | {"outcome": "fine"}),
    "a field twice": lambda good: good[:-1] + ', "outcome": "ok"}',
    "no request": lambda good: json.dumps(GOOD | {"by_request": []}),
    "too deep": lambda good: "[" * 10_000,
    "a scenario": lambda good: json.dumps(GOOD["scenario"]),
    "half a confirmation": lambda good: json.dumps({"kind": "confirmation", "before": {"result": GOOD}}),
    "lines with one cut off": lambda good: f"{good}\n{good[:-40]}\n",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_result_is_one_line(tmp_path: Path, kind: str) -> None:
    good = write(tmp_path, json.dumps(GOOD), "good.json")
    bad = write(tmp_path, BAD[kind](json.dumps(GOOD)))
    for words in (["why", bad], ["compare", bad, good], ["compare", good, bad]):
        code, err = call(words)
        assert (code, err.count("\n")) == (2, 1), err
        assert bad in err


def test_one_of_several_is_chosen(tmp_path: Path) -> None:
    other = run(build({"model": "layers=1,mla=8", "prompt_tokens": 32})).to_dict()
    lines = write(tmp_path, f"{json.dumps(GOOD)}\n{json.dumps(other)}\n", "matrix.jsonl")
    array = write(tmp_path, json.dumps([GOOD, other]), "matrix.json")
    sides = write(tmp_path, json.dumps({"kind": "confirmation", "before": {"result": GOOD}, "after": {"result": other}}), "c.json")
    for place, names in ((lines, "12"), (array, "12"), (sides, ("before", "after"))):
        with pytest.raises(InputError, match=f"holds 2 results; give .*{place}:{names[0]}"):
            read_result(place)
        assert [read_result(f"{place}:{name}").digest for name in names] == [GOOD["digest"], other["digest"]]
        with pytest.raises(InputError, match="has no result '3'"):
            read_result(f"{place}:3")
    assert call(["why", f"{lines}:2"])[0] == call(["compare", f"{lines}:1", f"{sides}:before", "--check"])[0] == 0
    named = write(tmp_path, json.dumps(GOOD), "odd:3")
    assert read_result(named).digest == GOOD["digest"]


def test_an_edited_file_can_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from click.testing import CliRunner

    from kvcover.real_backend.commands.compare import command

    good = write(tmp_path, json.dumps(GOOD), "good.json")
    bad = write(tmp_path, json.dumps(GOOD | {"router": "a\x1b[31mred", "faults": [{"fault": "\x1b[31m", "fired": 0}]}))
    assert "\x1b" not in CliRunner().invoke(command, [good, bad, "--all"]).output
