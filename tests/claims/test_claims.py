"""What must come out: numbers from public reports, from the real connector and from closed forms, by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcover import RELEASES, Result, build, resolve, run, run_world
from kvcover.sim.cache.ledger import Count
from kvcover.sim.kernel.events import KINDS, Took
from kvcover.sim.kernel.history import History
from kvcover.sim.results.judge import judge
from kvcover.sim.results.story import _TOLD, story
from kvcover.sim.simulate import record_of

MLA, EIGHT, TWO = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8", "layers=2,kv_heads=2,head_dim=8"
FIXED = ["0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]


def go(release: str, prefill: int, decode: int, model: str = MLA, *faults: str, decode_dp: int = 1, **fields: Any) -> Result:
    data = {
        "release": release,
        "prefill": {"tp": prefill},
        "decode": {"tp": decode, "dp": decode_dp},
        "model": model,
        "faults": list(faults),
    }
    return run(build({**data, **fields}))


def covered(result: Result) -> list[float | None]:
    return [rank.coverage for rank in result.by_rank]


def told(result: Result) -> list[int]:
    return [rank.tp for rank in result.by_rank if rank.told]


@pytest.mark.parametrize("release", ["0.25.1", "0.26.0"])
@pytest.mark.parametrize("faults", [(), ("drop:remote_tp_size@prefill",)])
def test_rank_collapse(release: str, faults: tuple[str, ...]) -> None:
    """vllm#47764: one decode rank of eight is written, all are told, whether the key is sent or not."""
    result = go(release, 8, 8, MLA, *faults)
    assert covered(result) == [1.0] + [0.0] * 7
    assert (result.coverage, told(result), result.outcome) == (0.125, list(range(8)), "corrupt")


def test_rank_collapse_with_eight_heads_mixes_rank_0() -> None:
    result = go("0.26.0", 8, 8, EIGHT)
    assert covered(result)[1:] == [0.0] * 7
    first = result.by_rank[0]
    assert first.coverage is not None
    assert first.wrong is not None
    assert first.coverage + first.wrong == 1.0


def test_the_name_that_0_26_reads_heals_it() -> None:
    result = go("0.26.0", 8, 8, MLA, "rename:remote_tp_size=tp_size@prefill")
    assert (result.coverage, result.outcome) == (1.0, "ok")


@pytest.mark.parametrize("release", FIXED)
def test_0_27_to_0_32(release: str) -> None:
    assert (go(release, 8, 8).coverage, go(release, 8, 8).outcome) == (1.0, "ok")
    fan_in = go(release, 8, 4)
    assert (covered(fan_in), told(fan_in), fan_in.outcome) == ([1, 1, 0, 0], [0, 1, 2, 3], "corrupt")
    fan_out = go(release, 4, 8)
    assert (covered(fan_out), told(fan_out), fan_out.outcome) == ([1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 2, 3], "hang")
    assert go(release, 4, 4, MLA, "drop:remote_tp_size").coverage == 1.0
    key_1 = go(release, 4, 4, MLA, "set:remote_tp_size=1")
    assert (covered(key_1), told(key_1), key_1.outcome) == ([1, 0, 0, 0], [0, 1, 2, 3], "corrupt")


def test_0_24_has_no_rank_map() -> None:
    result = go("0.24.0", 4, 4, MLA, "set:remote_tp_size=1")
    assert (result.coverage, result.outcome) == (1.0, "ok")


@pytest.mark.parametrize("model", [MLA, EIGHT, TWO])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 2), (4, 8), (8, 4), (1, 8), (8, 1)])
def test_0_33_covers_unequal_tp(model: str, prefill: int, decode: int) -> None:
    result = go("0.33.0", prefill, decode, model)
    assert (result.coverage, result.outcome) == (1.0, "ok")


def test_0_33_with_wrong_keys() -> None:
    key_1 = go("0.33.0", 4, 4, EIGHT, "set:remote_tp_size=1")
    assert (key_1.coverage, told(key_1), key_1.outcome) == (0.25, [], "hang")
    dropped = go("0.33.0", 4, 2, EIGHT, "drop:remote_tp_size")
    assert (dropped.coverage, told(dropped), dropped.outcome) == (0.25, [0, 1], "corrupt")


@pytest.mark.parametrize("release", ["0.25.1", *FIXED, "0.33.0"])
def test_dp_and_an_unknown_size(release: str) -> None:
    """A dropped key erases the DP term of the port (the fix's own regression): right before it, cross-rank since."""
    result = go(release, 1, 1, MLA, "drop:remote_tp_size", decode_dp=2)
    if release == "0.25.1":
        assert (result.coverage, result.outcome, result.stray) == (1.0, "ok", 0)
    else:
        assert covered(result)[1] == 0.0
        assert (result.outcome, result.sets.told, result.stray) == ("corrupt", ["D0.0", "D1.0"], 2 * 16)


def test_router_0_1_15_collapses_the_fixed_releases() -> None:
    """It sends 1 whatever registered (router#192): silent up to 0.32, a hang in 0.33; 0.24 does not care."""
    outcomes = {r: go(r, 8, 8, router="vllm-router 0.1.15").outcome for r in ("0.24.0", "0.27.0", "0.32.0", "0.33.0")}
    assert outcomes == {"0.24.0": "ok", "0.27.0": "corrupt", "0.32.0": "corrupt", "0.33.0": "hang"}
    assert go("0.32.0", 8, 8, router="vllm-router 0.1.16").outcome == "ok"


def test_the_three_changes_of_the_fix_one_by_one() -> None:
    """On 0.26.0 the name alone heals a sent key; a dropped one needs the map too. On 0.27.0 each can be taken back."""
    name, unknown = {"peer_tp": "remote_tp_size_or_tp_size_or_0"}, {"unknown_tp_map": "zero_is_own"}
    assert go("0.26.0", 8, 8, overrides=name).outcome == "ok"
    assert go("0.26.0", 8, 8, MLA, "drop:remote_tp_size", overrides=name).outcome == "hang"
    assert go("0.26.0", 8, 8, MLA, "drop:remote_tp_size", overrides=name | unknown).outcome == "ok"
    assert go("0.26.0", 8, 8, overrides=unknown).outcome == "corrupt"
    assert go("0.27.0", 8, 8, overrides={"peer_tp": "tp_size_or_1"}).coverage == 0.125
    guard = {"unknown_tp_guard": "refused"}
    assert go("0.27.0", 8, 8, MLA, "drop:remote_tp_size@decode", mode="read", overrides=guard).outcome == "crash"
    negative = ("set:remote_tp_size=-1@prefill",)
    assert go("0.27.0", 8, 8, MLA, *negative).outcome == "hang"
    assert go("0.27.0", 8, 8, MLA, *negative, overrides={"unknown_tp_map": "non_positive_is_own"}).outcome == "ok"


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("model", [MLA, EIGHT, TWO, "layers=2,kv_heads=6,head_dim=8"])
def test_reference_is_right_or_refuses(mode: str, model: str) -> None:
    sizes = (1, 2, 3, 6) if "kv_heads=6" in model else (1, 2, 3, 4, 6, 8, 16) if model == MLA else (1, 2, 4, 8, 16)
    for prefill in sizes:
        for decode in sizes:
            result = go("reference", prefill, decode, model, mode=mode)
            multiple = max(prefill, decode) % min(prefill, decode) == 0
            assert result.outcome == ("ok" if multiple else "refused"), (prefill, decode)
            assert result.coverage == (1.0 if multiple else 0.0)
            assert result.stray == 0


def test_ports_of_dp_and_tp_collide() -> None:
    """vllm#52014: rank (dp, tp) binds base + dp + tp, so dp 2 × tp 2 needs four ports and has three."""
    result = go("0.27.0", 2, 2, decode_dp=2)
    assert "port-taken" in [finding.kind for finding in result.findings]
    assert result.outcome == "hang"
    assert go("reference", 2, 2, decode_dp=2).outcome == "ok"


def test_a_fault_that_changes_nothing_is_vacuous() -> None:
    result = go("0.27.0", 2, 2, MLA, "drop:remote_tpsize")
    assert result.outcome == "vacuous"
    assert [fault.fired for fault in result.faults] == [0]


def test_read_without_barrier_uses_layers_before_they_land() -> None:
    """vllm#48534: on a real wire 0.27.0 runs attention before the KV lands; 0.33.0 waits for the whole step."""
    early, late = (go(release, 4, 4, "deepseek-v3", mode="read", prompt_tokens=4096) for release in ("0.27.0", "0.33.0"))
    assert early.outcome == "corrupt"
    assert early.coverage < 1.0 == early.coverage_end
    assert "used-before-landing" in [finding.kind for finding in early.findings]
    assert (late.coverage, late.outcome) == (1.0, "ok")


def test_early_use_is_told_where_nobody_sees_landings() -> None:
    """A real run knows only what was there at go and what at the end."""
    world = run_world(resolve(build({"release": "0.27.0", "mode": "read", "model": "deepseek-v3", "prompt_tokens": 4096,
                                     "prefill": {"tp": 4}, "decode": {"tp": 4}})))[1]  # fmt: skip
    blind = msgspec.structs.replace(record_of(world), observed=frozenset(KINDS) - {"used_early"})
    found = judge(blind, digest=None, events=0, virtual_ns=None, seconds=0.0, replay="").findings
    assert [finding.text for finding in found if finding.kind == "used-before-landing"] == [
        "D0–D3 used layers before their reads landed"
    ]
    assert not [finding for finding in found if finding.kind == "never-read"]


def test_early_use_is_told_of_ranks_that_read_late_and_of_no_other() -> None:
    """Request 1 is nobody's: nothing is read for it. In a real run its cells may be filled later, by whatever."""
    world = run_world(resolve(build({"release": "0.27.0", "mode": "read", "model": "layers=2,mla=8", "prefill": {"dp": 2}, "decode": {"dp": 2},
                                     "fabric": "loopback", "requests": [{}, {"prefill_dp": 1, "decode_dp": 1, "plain": True}]})))[1]  # fmt: skip
    record = record_of(world)
    first, second = record.courses
    whole = first.at_end[0]
    courses = (
        msgspec.structs.replace(first, at_go=(whole,)),
        msgspec.structs.replace(second, at_go=(Count(0, 0, whole.cells),), at_end=(whole,)),
    )
    seen = {"blind": frozenset(KINDS) - {"used_early"}, "seeing": frozenset(KINDS)}
    for name, observed in seen.items():
        real = msgspec.structs.replace(record, courses=courses, observed=observed)
        found = judge(real, digest=None, events=0, virtual_ns=None, seconds=0.0, replay="").findings
        assert "used-before-landing" not in {finding.kind for finding in found}, name
    history = History()
    history.rows = [*record.history.rows, (10**9, "used_early", "D1.0", "P1.0", 1, 0, Took(5))]
    real = msgspec.structs.replace(record, courses=courses, observed=seen["seeing"], history=history)
    found = judge(real, digest=None, events=0, virtual_ns=None, seconds=0.0, replay="").findings
    assert [f.text for f in found if f.kind == "used-before-landing"] == ["D1.0 used layers before their reads landed"]


def test_findings_name_the_whole_chain() -> None:
    finding = go("0.26.0", 8, 8).findings[0]
    assert finding.text == "P1–P7 dialled port 7301, bound by D0, not D1–D7"
    causes = " ← ".join(finding.causes)
    assert "reads `tp_size`, which was not sent, default 1" in causes
    assert "`remote_tp_size` = 8 was sent and not read" in causes


@pytest.mark.parametrize("release", list(RELEASES))
def test_equal_tp_is_good_in_write_unless_the_key_is_misread(release: str) -> None:
    """The oldest promise of the connector; 0.25 and 0.26 broke it for TP above 1."""
    for tp in (1, 2, 4, 8):
        result = go(release, tp, tp, EIGHT)
        assert result.outcome == ("corrupt" if release in ("0.25.1", "0.26.0") and tp > 1 else "ok")


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"mode": "read", "release": "0.27.0", "requests": [{"plain": True}]}, "never-read", "request 0 is plain"),
        ({"mode": "read", "release": "0.31.0", "faults": ["preempt:0"]}, "never-read", "request 0 was preempted"),
        ({"release": "reference", "faults": ["drop-notice:write_done"]}, "request-failed", "drop-notice:write_done"),
        ({"release": "0.33.0", "faults": ["abort:0,at=waiting,ms=1", "delay-notice:remote_blocks,ms=100"]}, "leak", "abort_waiting"),
        ({"release": "0.27.0", "faults": ["crash-rank:P0,ms=3"]}, "crash", "crash-rank:P0,ms=3"),
    ],
)  # fmt: skip
def test_what_ends_badly_has_a_finding_with_its_cause(fields: dict[str, Any], kind: str, says: str) -> None:
    findings = run(build({"model": "layers=2,mla=64+16", "prompt_tokens": 32} | fields)).findings
    causes = [cause for finding in findings if finding.kind == kind for cause in finding.causes]
    assert any(says in cause for cause in causes)


def test_the_story_tells_every_kind_of_event() -> None:
    quiet = {"stands", "bound", "leg_sent", "fault_fired"}
    assert set(_TOLD) == set(KINDS) - quiet
    world = run_world(resolve(build({"model": "layers=2,mla=64+16", "decode": {"pp": 2}})))[1]
    assert any("could not bind" in line for line in story(record_of(world), 0))
