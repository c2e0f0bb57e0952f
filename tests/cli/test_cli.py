"""What people and scripts see: JSON fields, tables of 80 columns without colour, exit codes, the story of a request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, resolve, run_world
from kvcover.sim.results.story import MOST_LINES, story
from kvcover.sim.simulate import record_of

# The result format, by its fields; fields may be added, none renamed without a new `schema`.
FIELDS = {
    "schema", "tier", "release", "mode", "model", "router", "seed", "prefill", "decode", "outcome", "coverage", "coverage_end",
    "wrong", "stray", "by_rank", "sets", "findings", "checks", "faults", "digest", "events", "virtual_ns", "seconds", "replay",
}  # fmt: skip
COLLAPSE = ["run", "--release", "0.26.0", "--prefill", "tp=8", "--decode", "tp=8", "--model", "layers=4,mla=64+16"]


def test_json_has_the_fields_of_the_format(kvcover: Any) -> None:
    code, out, _ = kvcover(*COLLAPSE, "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) >= FIELDS
    assert set(result["by_rank"][0]) >= {"dp", "tp", "coverage", "wrong", "missing", "told"}
    assert set(result["sets"]) == {"needed", "written", "told", "prefill_told", "prefill_released"}
    assert set(result["findings"][0]) == {"kind", "text", "causes"}
    assert {check["verdict"] for check in result["checks"]} <= {"pass", "fail", "unknown"}
    assert (result["schema"], result["tier"], result["coverage"], result["outcome"]) == (1, "model", 0.125, "corrupt")


def test_the_replay_line_gives_the_same_history(kvcover: Any) -> None:
    import shlex

    _, out, _ = kvcover(*COLLAPSE, "--json", "--fault", "set:remote_tp_size=4@decode", "--seed", "7", "--set", "requests=2")
    first = json.loads(out)
    _, again, _ = kvcover(*shlex.split(first["replay"])[1:], "--json")
    assert json.loads(again)["digest"] == first["digest"]


def test_matrix_prints_a_line_of_json_a_pairing(kvcover: Any, tmp_path: Path) -> None:
    path = tmp_path / "matrix.jsonl"
    words = ("matrix", "--prefill", "1,2", "--decode", "1,2,4", "--mode", "write", "-o", str(path), "--json")
    code, out, _ = kvcover(*words)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(r["prefill"]["tp"], r["decode"]["tp"]) for r in lines] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    assert path.read_text() == out


@pytest.mark.parametrize("words", [
    COLLAPSE, ["matrix"], ["matrix", "--release", "0.26.0", "--prefill", "1,2,4,8,16", "--decode", "1,2,4,8,16,32,64"], ["releases"],
    ["releases", "0.26.0", "0.27.0"], ["models"], ["routers"], ["faults"],
])  # fmt: skip
def test_piped_output_is_plain_and_narrow(kvcover: Any, words: list[str]) -> None:
    code, out, err = kvcover(*words)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if "kvcover run" not in line]
    assert [line for line in lines if len(line) > 80] == [], "only a command line to copy may be longer"


def test_cells_of_a_matrix_say_coverage_and_outcome(kvcover: Any) -> None:
    _, out, _ = kvcover("matrix", "--release", "0.27.0", "--mode", "write", "--prefill", "4", "--decode", "4,8",
                        "--model", "layers=2,mla=64+16")  # fmt: skip
    assert re.search(r"1\.0 +│ 0\.5 ", out)
    assert re.search(r"ok +│ hang", out)
    assert "1 of 2 pairings are not good" in out


def test_a_matrix_as_markdown(kvcover: Any) -> None:
    words = ("--release", "0.27.0", "--mode", "write", "--prefill", "4", "--decode", "4,8", "--model", "layers=2,mla=64+16")
    code, out, _ = kvcover("matrix", *words, "--markdown")
    assert code == 0
    assert "| P \\ D | TP4 | TP8 |" in out
    assert "| TP4 | 1.0 ok | 0.5 hang |" in out
    assert out.rstrip().endswith("1 of 2 pairings are not good (WRITE 1 ok, 1 hang)")


@pytest.mark.parametrize(("words", "code"), [
    (["matrix", "--mode", "write", "--check"], 0),
    (["matrix", "--mode", "write", "--release", "0.27.0", "--check"], 1),
    ([*COLLAPSE, "--check"], 1),
    ([*COLLAPSE, "--set", 'expect={"outcome":"corrupt","coverage":0.125}'], 0),
    ([*COLLAPSE, "--set", 'expect={"coverage":0.25}'], 1),
    ([*COLLAPSE, "--set", 'expect={"told":["D0"]}'], 1),
    ([*COLLAPSE, "--set", 'expect={"told":["D0","D1","D2","D3","D4","D5","D6","D7"]}'], 0),
    (["run", "--fault", "drop:nothing", "--check"], 3),  # vacuous is never a pass
    (["run", "--fault", "drop:nothing"], 0),
])  # fmt: skip
def test_exit_codes(kvcover: Any, words: list[str], code: int) -> None:
    assert kvcover(*words)[0] == code


def test_why_tells_what_a_real_run_kept(kvcover: Any, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    kvcover(*COLLAPSE, "-o", str(path))
    told = {"stories": [["P0 wrote \x1b[31mred", "so: ok"]]}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"tier": "connector", "digest": None, "by_request": ["ok"], "backend": told})
    )
    code, out, err = kvcover("why", str(path))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "P0 wrote \\x1b[31mred",
        "so: ok",
        "the model ends it as corrupt, and this run as ok",
        "it keeps no events that could be compared with the model's",
    ]


@pytest.mark.parametrize("edited", [
    {"by_request": None}, {"by_request": []}, {"backend": {"stories": []}}, {"backend": {"stories": [7]}}, {"backend": 3}, {"backend": None},
])  # fmt: skip
def test_why_refuses_an_edited_result_of_a_real_run(kvcover: Any, tmp_path: Path, edited: dict[str, Any]) -> None:
    path = tmp_path / "real.json"
    kvcover(*COLLAPSE, "-o", str(path))
    whole = {"tier": "connector", "digest": None, "by_request": ["ok"], "backend": {"stories": [["so: ok"]]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | whole | edited))
    code, out, err = kvcover("why", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kvcover: {path}: ")


def test_why_tells_the_story_of_a_result(kvcover: Any, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    kvcover(*COLLAPSE, "-o", str(path))
    code, out, err = kvcover("why", str(path))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("router → prefill: remote_tp_size 8")
    assert "reads `tp_size`, which was not sent, default 1" in lines[2]
    assert any("wrote 4 layers into D0" in line for line in lines)
    assert lines[-1].startswith("so: corrupt")


@pytest.mark.parametrize("scenario", [
    {"mode": "read", "prefill": {"tp": 4}, "decode": {"tp": 2}, "model": "deepseek-v3", "release": "0.27.0"},
    {"prefill": {"tp": 4}, "decode": {"tp": 2}, "faults": ["drop:remote_tp_size"]},
    {"requests": 8, "workload": {"rate_per_s": 100}, "faults": ["duplicate-notice:remote_blocks,ms=5", "crash-rank:D0,ms=50"]},
    {"release": "0.32.0", "faults": ["fail-transfer:write,pattern=fpfpfpfp", "poison-notice:write_done", "late-rank:D0,ms=9"]},
])  # fmt: skip
def test_a_story_is_short_and_in_time(scenario: dict[str, Any]) -> None:
    _, world = run_world(resolve(build(scenario)))
    for request in range(len(world.transfers)):
        lines = story(record_of(world), request)
        assert len(lines) <= MOST_LINES
        times = [float(match[1]) for line in lines if (match := re.match(r"(\d+\.\d+)", line))]
        assert times == sorted(times)
        assert lines[-1].startswith("so: ")
