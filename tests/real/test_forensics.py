"""What a real run keeps for whoever looks for the line at fault: keys read, tracebacks, wrong cells, events, a clean log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import Result, build, resolve, run_world
from kvcover.real_backend.inside.raising import escaped
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.machine import trees
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.results.depart import departures, steps_of
from kvcover.sim.results.trace import trace
from kvcover.sim.simulate import steps_of_result
from tests.real.test_connector_tier import SMALL, needs, vllm
from tests.unit.test_trace import check_format

GOOD = [(release, mode) for release in ("0.24.0", "0.27.0", "0.33.0") for mode in ("write", "read")]


def test_an_exception_keeps_its_traceback_and_the_innermost_line_of_the_connector() -> None:
    space: dict[str, Any] = {}
    name = "/x/vllm/distributed/kv_transfer/kv_connector/v1/moriio/moriio_engine.py"
    exec(compile("def outer():\n    inner()\n\ndef inner():\n    below()\n", name, "exec"), space)
    exec(compile("def below():\n    {}['x']\n", "/x/kvcover/real_backend/moriio/loopback/mori/io.py", "exec"), space)
    try:
        space["outer"]()
    except KeyError as error:
        found = escaped("P0", "outer", error)
    assert found.place == "moriio_engine.py:5" and str(found.as_event()) == "KeyError: 'x' (in outer, moriio_engine.py:5)"
    assert found.traceback.startswith("Traceback") and found.traceback.count("moriio_engine.py") == 2


@pytest.fixture(scope="module")
def goods() -> dict[tuple[str, str], Result]:
    """Of the releases that are here."""
    here = {tree.version for tree in trees.trees()}
    chosen = [(release, mode) for release, mode in GOOD if release in here]
    needs(*(release for release, _ in chosen))
    scenarios = [build(SMALL | {"release": release, "mode": mode}) for release, mode in chosen]
    return dict(zip(chosen, connector_tier.many(scenarios), strict=True))


@pytest.fixture
def good(goods: dict[tuple[str, str], Result], release: str, mode: str) -> Result:
    needs(release)
    return goods[release, mode]


def backend(result: Result) -> dict[str, Any]:
    assert result.backend is not None
    return result.backend


@vllm
@pytest.mark.parametrize(("release", "mode"), GOOD)
def test_a_good_run_shows_no_warning(good: Result, release: str, mode: str) -> None:
    assert (good.outcome, backend(good)["log_tail"], backend(good)["tracebacks"]) == ("ok", [], [])
    assert backend(good)["wrong_cells"] == []


@vllm
@pytest.mark.parametrize(("release", "mode"), GOOD)
def test_a_good_run_has_the_events_of_the_model(good: Result, release: str, mode: str) -> None:
    real = steps_of_result("result", read_back(good))
    setup = resolve(build(SMALL | {"release": release, "mode": mode, "fabric": "loopback"}))
    assert departures(real, steps_of(run_world(setup)[1].history.rows), "the model") == []


@vllm
@pytest.mark.parametrize(("release", "mode"), GOOD)
def test_the_side_that_moves_the_data_read_a_size_where_the_tree_says(good: Result, release: str, mode: str) -> None:
    keys = {each["side"]: each for each in backend(good)["keys"]}
    assert set(keys) == {"prefill", "decode"} and not any(each["copied"] for each in keys.values())
    mover = keys["prefill" if mode == "write" else "decode"]
    folder = Path(trees.find(release).path or "") / MORIIO_FOLDER
    for read in mover["read"]:
        lines = (folder / read["file"]).read_text().splitlines()
        assert read["code"] == lines[read["line"] - 1].strip()
        around = " ".join(lines[read["line"] - 1 : read["line"] + 2])  # a call may go on in the lines below
        assert re.search(rf"""['"]{read["key"]}['"]""", around), (read, around)
    size = "tp_size" if release == "0.24.0" else "remote_tp_size"
    assert size in {read["key"] for read in mover["read"]}
    assert ("remote_tp_size" in mover["never_read"]) == (release == "0.24.0")


@vllm
@pytest.mark.parametrize(("release", "mode"), GOOD)
def test_a_timeline_of_a_real_run_is_as_well_formed_as_one_of_the_model(good: Result, release: str, mode: str) -> None:
    setup, steps = resolve(build(good.scenario or {})), steps_of_result("result", read_back(good))
    arrows = check_format(json.loads(trace(setup, steps))["traceEvents"])
    layers = {arrow for arrow in arrows if arrow[0].startswith("layer")}
    pairs = {(f"layer {layer} of request 0", f"P{rank}", f"D{rank}") for layer in (0, 1) for rank in (0, 1)}
    assert layers == pairs if mode == "write" else len(layers) == 4
    heard = {to for name, _, to in arrows if name.startswith("write_done" if mode == "write" else "release")}
    assert heard == ({"D0", "D1"} if mode == "write" else {"P0", "P1"})


@vllm
def test_the_finding_of_0_26_leads_to_the_line_that_reads_the_size(tmp_path: Path) -> None:
    needs("0.26.0")
    file, timeline = tmp_path / "r.json", tmp_path / "t.json"
    scenario = ["--release", "0.26.0", "--prefill", "tp=8", "--decode", "tp=8", "--model", "layers=2,mla=64+16"]
    done = kvcover("run", "--tier", "connector", *scenario, "-v", "-o", str(file), "--trace", str(timeline))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    (finding,) = (each for each in result["findings"] if each["kind"] == "wrong-peer")
    found = re.fullmatch(r"prefill read `tp_size` \((\w+\.py):(\d+)\), absent, default 1", finding["causes"][0])
    assert found
    tree = Path(trees.find("0.26.0").path or "") / MORIIO_FOLDER
    assert 'kv_transfer_params.get("tp_size", 1)' in (tree / found[1]).read_text().splitlines()[int(found[2]) - 1]
    assert finding["causes"][1:] == ["`remote_tp_size` = 8 was sent to prefill and never read"]
    assert "keys: prefill never read what was sent: `remote_tp_size` = 8" in done.stdout
    assert check_format(json.loads(timeline.read_text())["traceEvents"])
    told = kvcover("why", str(file)).stdout.splitlines()
    assert told[-1] == "the same events as the model, whatever their order and number"
    baseline = tmp_path / "good.json"
    baseline.write_text(run_world(resolve(build(result["scenario"] | {"release": "0.27.0"})))[0].to_json())
    told = kvcover("why", str(file), "--baseline", str(baseline)).stdout.splitlines()
    assert f"here, and not in {baseline}: P1–P7 handshook: D0 answered" in told


@vllm
def test_the_routers_own_legs_lead_to_the_line_too() -> None:
    needs("0.26.0")
    result = connector_tier.run(build(SMALL | {"release": "0.26.0", "router": "vllm-router 0.1.17"}))
    (finding,) = (each for each in result.findings if each.kind == "wrong-peer")
    assert finding.causes[0].startswith("prefill read `tp_size` (moriio_common.py:")


@vllm
def test_an_exception_of_the_connector_is_kept_whole_and_its_line_is_told() -> None:
    needs("0.27.0")
    result = connector_tier.run(build(SMALL | {"release": "0.27.0", "mode": "write", "faults": ["drop:transfer_id@prefill"]}))
    (crash,) = (each for each in result.findings if each.kind == "crash")
    (kept,) = backend(result)["tracebacks"]
    assert kept["place"] and kept["place"] in crash.text
    assert kept["effect"] == "raised" and kept["traceback"].startswith("Traceback") and kept["text"] in kept["traceback"]
    assert f'{kept["place"].partition(":")[0]}", line {kept["place"].partition(":")[2]}' in kept["traceback"]


@vllm
@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"prefill": {"layout": "interleaved"}, "decode": {}}, {"plane", "block"}),  # whole blocks, of K or V
        ({"prefill": {"tp": 4}, "decode": {"tp": 2}}, {"mixed", "partial"}),  # of half as many heads each
    ],
)
def test_wrong_cells_are_all_counted_and_say_what_they_hold(fields: dict[str, Any], kinds: set[str]) -> None:
    needs("0.27.0")
    result = connector_tier.run(build({"release": "0.27.0", "model": "layers=2,kv_heads=8,head_dim=8", **fields}))
    setup = resolve(build(result.scenario or {}))
    cells = setup.decode.needed(setup.requests[0])
    assert result.wrong > 0
    for rank, told in zip((rank for rank in result.by_rank if rank.wrong), backend(result)["wrong_cells"], strict=True):
        assert told["rank"] == f"D{rank.tp}" and sum(told["kinds"].values()) == round((rank.wrong or 0) * cells)
        assert set(told["kinds"]) <= kinds and all(" holds" in line for line in told["first"])
    (finding,) = (each for each in result.findings if each.kind == "wrong-content")
    assert backend(result)["wrong_cells"][0]["first"][0] in finding.text


@vllm
def test_both_lives_of_a_restarted_engine_are_kept() -> None:
    needs("0.33.0")
    scenario = {
        **SMALL,
        "release": "0.33.0",
        "requests": [{}, {"arrival_ns": 3_000_000_000}],
        "faults": ["restart-rank:P1,ms=800,for=500"],
    }
    result = connector_tier.run(build(scenario))
    events = steps_of_result("result", read_back(result))
    dials = [step for step in events if step.kind == "dialled" and step.actor == "P0"]
    bound = [step for step in events if step.kind == "bound" and step.actor == "P0"]
    assert len(bound) == 4 and dials
    assert {request for each in backend(result)["keys"] if each["side"] == "prefill" for request in each["requests"]} == {0, 1}


def read_back(result: Result) -> Result:
    """As a file keeps it."""
    return msgspec.json.decode(result.to_json(), type=Result)


def kvcover(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvcover", *words], capture_output=True, text=True, timeout=300, check=False)
