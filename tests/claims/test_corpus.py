"""The corpus of public reports: every file is right in itself, and every expectation in it holds on the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, build, resolve, run
from kvcover.sim.results.result import GOOD
from kvcover.sim.scenario.endpoint import Endpoint
from kvcover.sim.search.corpus import (
    PAGE,
    Case,
    PublicReport,
    cases,
    corpus_files,
    judge,
    load_corpus,
    load_omitted,
    load_report,
    page,
    releases_of,
    run_cases,
    select,
    spans,
)

REPORTS = load_corpus()
CASES = list(cases(REPORTS))
ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row for row in tomllib.loads((Path(__file__).parents[1] / "data" / "measured.toml").read_text())["row"]
}
MEASURED = [case for case in CASES if case.expected.row]


def engine(endpoint: Endpoint) -> dict[str, Any]:
    """One side as a row has it: what is said of its caches, or nothing."""
    said = {name: getattr(endpoint.side, name) for name in ("block_size", "layout", "order", "kv_dtype")}
    return {"tp": endpoint.tp, "dp": endpoint.dp} | {name: value for name, value in said.items() if value is not None}


def name_of(case: Case) -> str:
    return "-".join(part for part in (case.report.report, case.variant, case.release) if part)


# -- every expectation, on the model -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_expectation_holds(case: Case) -> None:
    verdict = judge(case, run(case.scenario))
    assert not verdict.problem, verdict.result.replay


@pytest.mark.parametrize("case", MEASURED, ids=name_of)
def test_row_confirms_the_expectation(case: Case) -> None:
    """The named row has the same scenario, but for layers, block numbers and timers, and the same outcome and coverage."""
    row, setup, want = ROWS[f"{case.release}/{case.expected.row}"], resolve(case.scenario), case.expected
    mine = {
        "mode": case.scenario.mode,
        "prefill": engine(setup.prefill),
        "decode": engine(setup.decode),
        "router": setup.router.name,
        "faults": list(case.scenario.faults),
        "requests": len(setup.requests),
        "heads": (setup.geometry.mla, setup.geometry.kv_heads),
    }
    measured = resolve(build({"release": row["release"], "model": row["model"]})).geometry
    theirs = {key: row[key] for key in ("mode", "prefill", "decode", "router", "faults")}
    assert mine == theirs | {"requests": len(row["requests"]), "heads": (measured.mla, measured.kv_heads)}
    assert row["expect"]["outcome"] == want.outcome
    if want.coverage is not None:
        coverage = row["expect"]["coverage"]
        assert sum(coverage) / len(coverage) == want.coverage
        assert want.by_rank is None or list(want.by_rank) == coverage


# -- the files ---------------------------------------------------------------------------------------------------


def test_there_are_enough_and_each_is_there_once() -> None:
    ids = [name for report in REPORTS for name in (report.report, *report.also)]
    omitted = [name for entry in load_omitted() for name in entry.ids]
    assert len(REPORTS) >= 40
    assert len(set(ids + omitted)) == len(ids + omitted)
    assert len(REPORTS) == len(corpus_files())
    own = [r for r in REPORTS if r.report.split("#")[0] in ("vllm", "router", "mori")]
    assert len(own) >= 30


@pytest.mark.parametrize("report", REPORTS, ids=[report.report for report in REPORTS])
def test_each_report_is_bad_somewhere(report: PublicReport) -> None:
    assert any(case.expected.outcome not in GOOD for case in cases([report]))
    assert report.url.rsplit("/", 1)[1] == report.report.split("#")[1]


@pytest.mark.parametrize("text", [text for r in REPORTS for text in (r.title, r.seen, r.why, *(v.why for v in r.variants))])
def test_texts_are_sentences(text: str) -> None:
    assert text == text.strip()
    assert "  " not in text
    assert "\n" not in text


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m kvcover.sim.search.corpus`"


# -- strictness --------------------------------------------------------------------------------------------------

GOOD_FILE = """
report = "vllm#1"
url = "https://github.com/vllm-project/vllm/issues/1"
title = "A title"
seen = "Seen."
why = "Why."
evidence = "source"

[scenario]
mode = "write"

[expect]
"0.33.0" = {outcome = "ok"}
"""


@pytest.mark.parametrize(("old", "new", "says"), [
    ("[scenario]", "extra = 1\n[scenario]", "vllm-1.toml: extra: no such field"),
    ('mode = "write"', 'mod = "write"', "vllm-1.toml: scenario.mod: no such field"),
    ('mode = "write"', 'mode = "wrote"', "vllm-1.toml: scenario.mode: 'wrote'"),
    ('mode = "write"', 'release = "0.33.0"', "vllm-1.toml: scenario.release: is not part"),
    ('mode = "write"', 'faults = ["drop:"]', "vllm-1.toml: scenario.faults[0]"),
    ('mode = "write"', "prefill = {tp = 3}", "vllm-1.toml: scenario.prefill.tp"),
    ('outcome = "ok"', 'outcome = "ok", coverag = 1.0', "vllm-1.toml: expect.'0.33.0'.coverag: no such field; did you mean 'coverage'?"),
    ('outcome = "ok"', 'outcome = "fine"', "vllm-1.toml: expect"),
    ('outcome = "ok"', "coverage = 1.0", "missing required field outcome"),
    ('outcome = "ok"', 'outcome = "ok", row = "write/p8d8/mla/toy"', "vllm-1.toml: evidence: 'source' with 1 rows"),
    ('"0.33.0"', '"9.9.0"', "vllm-1.toml: expect.'9.9.0': no release '9.9.0'"),
    ('"0.33.0"', '"0.33.0..0.24.0"', "can't read '0.33.0..0.24.0'"),
    ('"0.33.0"', '"0.33.0, 0.33.0"', "0.33.0 is named twice"),
    ('"0.33.0" = {outcome = "ok"}', "", "vllm-1.toml: expect: names no release"),
    ('"vllm#1"', '"vllm#2"', "vllm-1.toml: report: 'vllm#2' is kept in vllm-2.toml"),
    ('"vllm#1"', '"vllm"', "vllm-1.toml: report"),
    ('seen = "Seen."', "", "missing required field seen"),
    ("[expect]", "[[variants]]\nname = \"x\"\nwhy = \"Y.\"\nscenario = {mde = 1}\nexpect = {\"0.33.0\" = {outcome = \"ok\"}}\n[expect]",
     "vllm-1.toml: variants[0].scenario.mde: no such field"),
    ("report", "report = ", "vllm-1.toml: is not TOML"),
])  # fmt: skip
def test_bad_files(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = tmp_path / "vllm-1.toml"
    file.write_text(GOOD_FILE.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        load_report(file)
    assert says in str(error.value)


def test_good_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm-1.toml"
    file.write_text(GOOD_FILE)
    assert load_report(file).report == "vllm#1"


def test_ranges() -> None:
    assert releases_of("0.24.0, 0.26.0..0.28.0", "x") == ["0.24.0", "0.26.0", "0.27.0", "0.28.0"]
    assert spans(["0.24.0", "0.26.0", "0.27.0", "0.28.0"]) == "0.24.0, 0.26.0–0.28.0"


def test_select_by_any_of_its_names() -> None:
    assert [r.report for r in select(REPORTS, ["vllm-47764", "router#223"])] == ["router#181", "vllm#47764"]
    with pytest.raises(InputError, match="did you mean 'vllm#47764'"):
        select(REPORTS, ["vllm#4776"])


def test_a_wrong_expectation_is_found() -> None:
    """0.25.1 expected as 0.24.0 is: judged by outcome, coverage, ranks and requests."""
    (old, new) = (next(c for c in CASES if c.report.report == "vllm#47764" and c.release == r) for r in ("0.24.0", "0.25.1"))
    [verdict] = run_cases([new])
    assert not verdict.problem
    assert judge(Case(**{f: getattr(new, f) for f in ("report", "variant", "why", "release", "scenario")}, expected=old.expected),
                 verdict.result).problem == "expected outcome ok, got corrupt; expected coverage 1, got 0.125"  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------


def kvcover(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvcover.sim.commands.corpus import command; command()", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}, check=False)


def test_command_table_fits_and_counts() -> None:
    done = kvcover("--check")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "0 not as expected" in " ".join(done.stdout.split())
    assert f"{len(REPORTS)} reports, {len(CASES)} runs" in done.stdout


def test_command_json_and_one_report() -> None:
    done = kvcover("vllm#47764", "--release", "0.26.0", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["outcome"] == "corrupt"
    assert lines[0]["corpus"] == {
        "report": "vllm#47764", "variant": "", "evidence": "measured", "as_expected": True, "problem": "",
        "expected": {"outcome": "corrupt", "coverage": 0.125, "by_rank": [1.0] + [0.0] * 7},
        "measured": "0.26.0/write/p8d8/mla/toy",
    }  # fmt: skip
    told = kvcover("vllm#47764", "--release", "0.26.0").stdout
    assert "bad as expected, on the real connector too" in " ".join(told.split())
