"""`router check`: what engines read of legs, what comes of them, and legs that work.

What a release reads, and what a value leads to, is expected from the notes K1 to K37 of docs/protocol.md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, build, run
from kvcover.sim.scenario.legs_file import parse_legs
from kvcover.sim.scenario.routers import ROUTERS
from kvcover.sim.search.legs_check import Verdict, check_legs, legs_as_file, startable
from kvcover.sim.search.legs_read import Reading, read_by_engines

ALL = ("0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
MLA = "layers=2,mla=64+16"


def legs_of(router: str, *modes: str) -> str:
    return json.dumps({mode: dict(zip(("prefill", "decode"), ROUTERS[router].legs(mode), strict=True)) for mode in modes})


def check(legs: str, releases: Any, prefill: Any = 4, decode: Any = 4, types: bool = False, **fields: Any) -> list[Verdict]:
    sides = {name: {"tp": size} if isinstance(size, int) else size for name, size in (("prefill", prefill), ("decode", decode))}
    return check_legs(parse_legs(legs, "-"), startable(build({"model": MLA, **sides, **fields})), releases, "-", types)


def reading(verdict: Verdict, side: str, key: str) -> Reading:
    return next(each for each in verdict.legs[side] if each.key == key)


def test_a_size_of_1_by_release() -> None:
    """router#192: corrupt from 0.25.1 to 0.32.0, a hang in 0.33.0, and 0.24.0 maps no ranks."""
    found = check(legs_of("vllm-router 0.1.15", "write"), ALL)
    assert [verdict.outcome for verdict in found] == ["ok", *["corrupt"] * 8, "hang"]
    assert [verdict.good for verdict in found] == [True, *[False] * 9]


@pytest.mark.parametrize("release", ALL)
def test_who_reads_the_tp_size(release: str) -> None:
    """K1, K3: `tp_size` alone up to 0.26.0, then `remote_tp_size` first; decode's WRITE leg is asked for it in 0.33.0 only."""
    (verdict,) = check(legs_of("vllm-router 0.1.16", "write"), [release])
    renamed = release >= "0.27.0"
    sent = reading(verdict, "prefill", "remote_tp_size")
    assert (sent.sent, sent.read) == (True, renamed)
    assert [each.key for each in verdict.legs["prefill"] if each.key == "tp_size" and each.read] == ([] if renamed else ["tp_size"])
    assert reading(verdict, "decode", "remote_tp_size").read == (release == "0.33.0")


def test_what_stands_in_for_a_missing_key() -> None:
    bare = json.dumps(
        {"prefill": {"do_remote_decode": True, "transfer_id": "t", "remote_engine_id": None, "remote_block_ids": None}}
    )
    old, fixed, new = check(bare, ["0.26.0", "0.27.0", "0.33.0"], mode="write")[:3]
    assert "default 1" in reading(old, "prefill", "tp_size").missing
    assert "0 = unknown" in reading(fixed, "prefill", "remote_tp_size").missing
    for verdict in (old, fixed, new):
        assert reading(verdict, "prefill", "remote_dp_size").missing == "counts as 1"  # K13
        assert verdict.filled == ["decode"]


def test_a_required_key_is_told_and_given_back() -> None:
    """K27: without it prefill dies."""
    legs = json.loads(legs_of("vllm-router 0.1.16", "write"))
    del legs["write"]["prefill"]["remote_block_ids"]
    (verdict,) = check(json.dumps(legs), ["0.32.0"])
    assert verdict.outcome == "crash"
    assert reading(verdict, "prefill", "remote_block_ids").missing.startswith("required")
    assert verdict.works is not None
    assert verdict.works.needed == ["prefill: remote_block_ids = null"]


def test_which_types_break_a_key() -> None:
    """K11: text dies; K10: true is 1, which collapses; K8: null is unknown, and right for equal sizes; K17: null dies."""
    (verdict,) = check(legs_of("vllm-router 0.1.16", "write"), ["0.27.0"], types=True)
    worse = reading(verdict, "prefill", "remote_tp_size").worse
    assert (worse["text"], worse["true"], worse.get("null")) == ("crash", "corrupt", None)
    assert reading(verdict, "prefill", "remote_dp_size").worse["null"] == "crash"
    assert reading(verdict, "decode", "remote_tp_size").worse == {}, "what nobody reads, nothing breaks"


def test_a_key_that_nobody_knows() -> None:
    legs = json.loads(legs_of("vllm-router 0.1.16", "write"))
    legs["write"]["prefill"]["remote_tp_sise"] = legs["write"]["prefill"].pop("remote_tp_size")
    (verdict,) = check(json.dumps(legs), ["0.27.0"])
    misspelt = reading(verdict, "prefill", "remote_tp_sise")
    assert (misspelt.read, misspelt.near) == (False, "remote_tp_size")
    assert reading(verdict, "decode", "remote_dp_size").near == "", "that one is known, and read elsewhere"


@pytest.mark.parametrize("release", ALL)
@pytest.mark.parametrize(("prefill", "decode"), [(4, 4), (2, 4), ({"dp": 2}, {"dp": 2})])
def test_legs_that_work_do(release: str, prefill: Any, decode: Any, tmp_path: Path) -> None:
    """Whatever is said to work is run from a file, as a user would; what isn't said to, the toy proxy can't do either."""
    found = check(legs_of("vllm-router 0.1.15", "write"), [release], prefill, decode)
    sides = {name: {"tp": size} if isinstance(size, int) else size for name, size in (("prefill", prefill), ("decode", decode))}
    scenario = {"release": release, "model": MLA, "fabric": "loopback", **sides}
    if found[0].works is None:
        assert run(build(scenario)).outcome != "ok"
        return
    file = tmp_path / "legs.json"
    file.write_text(json.dumps(legs_as_file(found)))
    assert run(build(scenario | {"router": str(file)})).outcome == "ok"


def test_what_no_legs_can_heal() -> None:
    """F5: a larger decode in WRITE up to 0.32.0; 0.33.0 serves it if the legs say the sizes."""
    old, new = check(legs_of("vllm-router 0.1.15", "write"), ["0.32.0", "0.33.0"], 4, 8)
    assert (old.works, old.best) == (None, "hang")
    assert new.works is not None
    with pytest.raises(InputError, match=r"no legs that work were found for WRITE on 0\.32\.0"):
        legs_as_file([old])


def test_the_key_that_no_router_sends() -> None:
    (verdict,) = check(legs_of("vllm-router 0.1.16", "write"), ["0.26.0"], 8, 8)
    assert verdict.works is not None
    assert verdict.works.needed == ["prefill: tp_size = 8"]


def test_pods() -> None:
    """K18b: a decode engine has to learn on which of prefill's hosts the request is."""
    (verdict,) = check(legs_of("vllm-router 0.1.15", "write"), ["0.33.0"], {"tp": 4, "dp": 2}, 8)
    assert verdict.works is not None
    assert {"remote_dp_rank", "remote_hosts"} <= set(verdict.works.decode)
    sides = {"prefill": {"tp": 4, "dp": 2}, "decode": {"tp": 8}}
    assert startable(build(sides)).prefill.pods == 2
    assert startable(build({"prefill": {"tp": 4}, "decode": {"dp": 2}})).decode.pods == 1


def test_reading_changes_nothing() -> None:
    for mode in ("write", "read"):
        scenario = build({"mode": mode, "prefill": {"tp": 2}, "decode": {"tp": 4}, "model": MLA, "router": "vllm-router 0.1.17"})
        assert read_by_engines(scenario)[0].digest == run(scenario).digest


def test_three_releases_take_no_more_than_three_seconds() -> None:
    began = time.process_time()
    check(legs_of("vllm-router 0.1.15", "write", "read"), ["0.27.0", "0.30.0", "0.33.0"], {"tp": 4, "dp": 2}, 8, types=True)
    assert time.process_time() - began < 3
