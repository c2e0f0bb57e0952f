"""`--baseline` and `--junit` of matrix, corpus, explore and run: exit codes, what is said, what is written."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

SMALL = ["--model", "layers=1,kv_heads=8,head_dim=8", "--prefill", "1,2", "--decode", "1,2"]
BREAKS = ["--override", "write_map=floor"]  # up to 0.32.0, one prefill rank wrote to one decode rank


@pytest.fixture
def stock(kvcover: Any, tmp_path: Path) -> str:
    path = tmp_path / "stock.json"
    assert kvcover("matrix", *SMALL, "-o", str(path))[0] == 0
    return str(path)


def cases(path: Path) -> dict[str, str]:
    """Each test case of a JUnit file and what it is: passed, failure, error or skipped."""
    root = ET.parse(path).getroot()
    suite = root[0]
    found = {case.attrib["name"]: next((inner.tag for inner in case if inner.tag != "system-out"), "passed") for case in suite}
    told = [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
    assert told == [len(found), *(list(found.values()).count(tag) for tag in ("failure", "error", "skipped"))]
    return found


def test_the_stock_release_passes_its_own_gate_though_read_crashes(kvcover: Any, tmp_path: Path) -> None:
    assert kvcover("matrix", *SMALL, "--check")[0] == 1
    code, out, err = kvcover("matrix", *SMALL, "--baseline", "0.33.0", "--junit", str(tmp_path / "j.xml"))
    assert (code, err) == (0, "")
    assert "8 runs, 0 worse, 0 open, 0 better, 2 bad and no worse" in out
    assert sorted(cases(tmp_path / "j.xml").values()) == ["passed"] * 6 + ["skipped"] * 2


@pytest.mark.parametrize("baseline", ["file", "release"])
def test_one_bad_policy_fails_it_where_it_matters_and_nowhere_else(kvcover: Any, stock: str, tmp_path: Path, baseline: str) -> None:
    junit = tmp_path / "j.xml"
    given = stock if baseline == "file" else "0.33.0"
    code, out, err = kvcover("matrix", *SMALL, *BREAKS, "--baseline", given, "--junit", str(junit))
    assert code == 1
    worse = {name for name, tag in cases(junit).items() if tag == "failure"}
    assert worse == {"write P1→D2", "write P2→D1"}, "equal sizes map as before, and READ does not write"
    assert "worse: write P1→D2: outcome ok → " in out
    assert err.startswith("kvcover: check failed: 2 of 8 pairings")


def test_better_is_said_and_passes(kvcover: Any, stock: str) -> None:
    code, out, _ = kvcover("matrix", *SMALL, "--release", "reference", "--baseline", stock)
    assert code == 0
    assert "better: read P1→D2: outcome crash → " in out


def test_what_the_baseline_has_must_be_run(kvcover: Any, stock: str) -> None:
    code, out, err = kvcover("matrix", *SMALL, "--mode", "write", "--baseline", stock)
    assert code == 3
    assert "open: read P1→D1: it is in the baseline and was not run" in out
    assert err.startswith("kvcover: inconclusive: ")


def test_what_the_baseline_lacks_must_be_good(kvcover: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "write.jsonl")
    kvcover("matrix", *SMALL, "--mode", "write", "-o", path)
    code, out, _ = kvcover("matrix", *SMALL, "--baseline", path)
    assert code == 1
    assert "worse: read P1→D2: outcome is crash" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "layers=2,mla=8"], "model is 'layers=1,kv_heads=8,head_dim=8' there and 'layers=2,mla=8' here"),
        (["--set", "prompt_tokens=64"], "prompt_tokens is left out there and 64 here"),
        (["--fault", "drop:transfer_id"], "faults"),
    ],
)
def test_a_baseline_of_another_scenario_is_refused(kvcover: Any, stock: str, words: list[str], said: str) -> None:
    code, out, err = kvcover("matrix", *SMALL, *words, "--baseline", stock)
    assert (code, out) == (2, "")
    assert err.startswith("kvcover: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "{}", '[{"schema": 1}]', '{"schema": 2, "outcome": "ok", "coverage": 1}'])
def test_a_baseline_that_is_none_is_refused(kvcover: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    code, out, err = kvcover("matrix", *SMALL, "--baseline", str(path))
    assert (code, out) == (2, "")
    assert str(path) in err and err.count("\n") == 1


def test_an_array_and_lines_are_read_alike(kvcover: Any, tmp_path: Path) -> None:
    one, many = tmp_path / "m.json", tmp_path / "m.jsonl"
    for path in (one, many):
        kvcover("matrix", *SMALL, "-o", str(path))
    array, lines = json.loads(one.read_text()), [json.loads(line) for line in many.read_text().splitlines()]
    assert [row["coverage"] for row in array] == [row["coverage"] for row in lines]
    code, out, _ = kvcover("compare", str(one), str(many), "--check")
    assert code == 0
    assert out == "no difference in what was seen in 8 cells\n"


def test_compare_tells_two_matrices_apart_cell_by_cell(kvcover: Any, stock: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.json")
    kvcover("matrix", *SMALL, *BREAKS, "--mode", "write", "-o", other)
    code, out, _ = kvcover("compare", stock, other, "--check")
    assert code == 1
    marked = [line.split("  ")[0] for line in out.splitlines() if line.startswith("≠")]
    assert marked[:2] == ["≠ write P1→D2", "≠ write P2→D1"]
    assert sum("only in A" in line for line in out.splitlines()) == 4
    assert out.splitlines()[-1] == "6 of 8 cells differ"


# -- the others ----------------------------------------------------------------------------------------------------


def test_corpus_beside_a_release(kvcover: Any, tmp_path: Path) -> None:
    report = ["corpus", "vllm#47764"]
    assert kvcover(*report, "--release", "0.27.0", "--baseline", "0.27.0")[0] == 0
    code, out, _ = kvcover(*report, "--release", "0.26.0", "--baseline", "0.27.0", "--junit", str(tmp_path / "j.xml"))
    assert code == 1
    assert "worse: vllm#47764: outcome ok → corrupt" in out
    assert cases(tmp_path / "j.xml")["vllm#47764"] == "failure"
    kept = str(tmp_path / "kept.jsonl")
    kvcover(*report, "--release", "0.27.0", "-o", kept)
    assert kvcover(*report, "--release", "0.26.0", "--baseline", kept)[0] == 1
    assert kvcover(*report, "--baseline", "0.27.0")[0] == 2, "of many releases, which?"


def test_explore_beside_a_release_fails_on_what_is_worse_only(kvcover: Any, tmp_path: Path) -> None:
    drawn = ["explore", "--jobs", "1", "--seeds", "40", "--release", "0.33.0", "--mode", "read", "--features", "tp,fabric"]
    code, out, _ = kvcover(*drawn, "--json")
    found = json.loads(out)
    assert found["outcomes"]["crash"] == found["failures"] > 0
    code, out, _ = kvcover(*drawn, "--json", "--baseline", "0.33.0", "--junit", str(tmp_path / "j.xml"))
    beside = json.loads(out)
    assert code == 0
    assert (beside["failures"], beside["known"]) == (0, found["failures"])
    assert list(cases(tmp_path / "j.xml").values()) == ["passed"]
    drawn[drawn.index("read")] = "write"
    code, out, _ = kvcover(*drawn, *BREAKS, "--json", "--baseline", "0.33.0", "--junit", str(tmp_path / "j.xml"))
    assert code == 1
    assert json.loads(out)["failures"] > 0
    assert set(cases(tmp_path / "j.xml").values()) == {"failure"}


def test_run_writes_junit_too(kvcover: Any, tmp_path: Path) -> None:
    junit = tmp_path / "j.xml"
    bad = ["run", "--release", "0.26.0", "--prefill", "2", "--decode", "2", "--model", "layers=1,mla=8"]
    kvcover(*bad, "--junit", str(junit))
    assert list(cases(junit).values()) == ["failure"]
    kvcover("run", "--model", "layers=1,mla=8", "--junit", str(junit))
    assert list(cases(junit).values()) == ["passed"]
    kvcover("run", "--model", "layers=1,mla=8", "--fault", "drop:nokey", "--junit", str(junit))
    assert list(cases(junit).values()) == ["error"], "a fault that never fired shows nothing, and is not green"


def test_junit_holds_what_xml_may_hold(tmp_path: Path) -> None:
    from kvcover.sim.results.gate import Cell
    from kvcover.sim.results.junit import junit
    from kvcover.sim.results.verdict import fail

    odd = '\x00\x1b[31m<&>"\ud800\uffff é'
    path = tmp_path / "j.xml"
    verdict = fail(odd)
    path.write_text(junit("kvcover matrix", [Cell(name=odd, verdict=verdict, replay=odd)], verdict), encoding="utf-8")
    assert list(cases(path).values()) == ["failure"]


def test_outputs_are_looked_at_before_the_run(kvcover: Any, stock: str, tmp_path: Path) -> None:
    for words in (["-o", stock], ["--junit", stock], ["--junit", str(tmp_path / "no" / "j.xml")], ["-o", "a", "--junit", "a"]):
        code, out, err = kvcover("matrix", *SMALL, "--baseline", stock, *words)
        assert (code, out) == (2, ""), words
        assert err.count("\n") == 1


def test_a_pairing_that_the_machine_could_not_run_is_shown_as_that_and_is_no_pass(
    kvcover: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvcover import Scenario, TierError
    from kvcover.sim.search import baseline

    whole = baseline.run_beside

    def spoilt(tier: Any, scenarios: list[Scenario], vllm: Any, stock: list[Scenario]) -> Any:
        now, before = whole(tier, scenarios, vllm, stock)
        return [TierError("--tier", "rank 0 died", "run it again"), *now[1:]], before

    monkeypatch.setattr(baseline, "run_beside", spoilt)
    junit = tmp_path / "j.xml"
    for words in ([], ["--baseline", "0.33.0"], ["--markdown", "--baseline", "0.33.0"]):
        got, out, err = kvcover("matrix", *SMALL, "--mode", "write", *words, "--junit", str(junit))
        assert (got, "not run" in out, "rank 0 died" in err) == (3, True, True)
        assert cases(junit)["write P1→D1"] == "error"
