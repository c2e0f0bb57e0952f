"""Races by order: each kind of race on the release that has it, what orders it, and that no verdict hangs on times."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcover import RELEASES, build, load, resolve, run
from kvcover.faults import FaultSyntaxError
from kvcover.sim.errors import InputError
from kvcover.sim.kernel.events import KINDS, Counted
from kvcover.sim.kernel.history import History, Row
from kvcover.sim.results.checkers import Plan, check_all
from kvcover.sim.results.order import AXIOMS, races
from kvcover.sim.results.outcome import plan_of
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import Result, raced
from kvcover.sim.results.show import summary_line
from kvcover.sim.results.verdict import PASS, judge_run
from kvcover.sim.scenario.scenario import Expect
from kvcover.sim.search.causes import explain
from kvcover.sim.search.swarm import Swarm, features_of
from kvcover.sim.simulate import record_of, run_world

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
MLA = "layers=4,mla=64+16"
GQA = "layers=4,kv_heads=8,head_dim=8"
TIMERS = {"transfer_timeout_s": 1.0, "defer_timeout_s": 2.0, "recv_abort_timeout_s": 3.0}
PUBLISHED = [name for name in RELEASES if name != "reference"]
COLLAPSED = ["0.25.1", "0.26.0"]  # the toy proxy's legs say nothing of a TP size that these read
NO_BARRIER = ["0.24.0", "0.25.1", "0.26.0", "0.27.0"]


def played(ptp: int, dtp: int, **fields: Any) -> tuple[Result, Record]:
    scenario = {"model": MLA, "timers": TIMERS, "prefill": {"tp": ptp}, "decode": {"tp": dtp}, **fields}
    result, world = run_world(resolve(build(scenario)))
    return result, record_of(world)


def found(record: Record) -> set[tuple[str, str]]:
    return {(race.what, race.missing) for race in races(record.history, plan_of(record))}


def kinds(ptp: int, dtp: int, **fields: Any) -> set[tuple[str, str]]:
    """The races of a scenario, each as what it is and which edge is missing."""
    result, record = played(ptp, dtp, **fields)
    assert raced(result.checks) == any(finding.kind == "race" for finding in result.findings)
    assert result.outcome != "vacuous"
    return found(record)


# -- use: does decode use blocks only when what moved into them must have landed? -----------------------------------


@pytest.mark.parametrize("fabric", ["cx7", "thor2", "loopback"])
@pytest.mark.parametrize("release", PUBLISHED)
def test_read_without_a_barrier_is_a_race_on_every_fabric(release: str, fabric: str) -> None:
    """vllm#48534: nothing waits for a read up to 0.27.0, also where all bytes are there before anything is used."""
    size = 1 if release in COLLAPSED else 2
    got = kinds(size, size, release=release, mode="read", fabric=fabric)
    assert got == ({("use", "barrier")} if release in NO_BARRIER else set())


@pytest.mark.parametrize("release", NO_BARRIER)
def test_a_barrier_orders_it(release: str) -> None:
    size = 1 if release in COLLAPSED else 2
    result, _ = played(size, size, release=release, mode="read", fabric="loopback")
    finding = next(finding for finding in result.findings if finding.kind == "race")
    assert any(cause.startswith("read_barrier = step would order it") for cause in finding.causes)
    assert kinds(size, size, release=release, mode="read", fabric="loopback", overrides={"read_barrier": "step"}) == set()


@pytest.mark.parametrize("release", COLLAPSED)
def test_the_rank_collapse_in_read_leaves_the_free_to_time(release: str) -> None:
    """Both decode ranks read P0, and the first of their releases makes it report: that says nothing of the other's read."""
    got = kinds(2, 2, release=release, mode="read", overrides={"read_barrier": "step"})
    assert got == {("free", "timer")}


@pytest.mark.parametrize(("release", "race"), [("0.28.0", True), ("0.30.0", True), ("0.31.0", False), ("0.32.0", False)])
def test_full_cuda_graphs_take_the_barrier_of_a_layer_away(release: str, race: bool) -> None:
    """wait_for_layer_load returns at once under full CUDA graphs; 0.31.0 waits for the step instead."""
    got = kinds(2, 2, release=release, mode="read", decode={"tp": 2, "cuda_graphs": "full"})
    assert got == ({("use", "barrier")} if race else set())


@pytest.mark.parametrize("release", PUBLISHED)
@pytest.mark.parametrize("model", [MLA, GQA])
def test_plain_write_has_none(release: str, model: str) -> None:
    """Statuses waited for → write_done → told → go, and → report → free, in every release."""
    assert kinds(4, 4, release=release, model=model, faults=[] if release > "0.27" else ["set:tp_size=4"]) == set()


def test_the_rank_collapse_is_no_race() -> None:
    """Every rank writes D0, waits, and tells its own decode rank; go waits for all. What is missing was never written."""
    result, record = played(4, 4, release="0.26.0")
    assert (result.outcome, found(record)) == ("corrupt", set())


def test_several_writers_and_the_first_message_that_completes() -> None:
    """P TP4 → D TP2: any one of two messages would do, so that nothing follows from the other's landing."""
    first = {"completion": "first_message"}
    assert kinds(4, 2, release="0.33.0", model=GQA, overrides=first) == {("use", "count")}
    assert kinds(4, 2, release="0.33.0", model=GQA) == set()


def test_a_second_message_of_one_writer_may_take_the_place_of_another_ones() -> None:
    """The executor counts reports and doesn't ask from whom: told twice, D0 may stand for D1. With one rank it can't."""
    twice = "duplicate-notice:write_done,to=D0,ms=1"
    assert kinds(2, 2, release="0.33.0", faults=[twice]) == {("use", "count")}
    assert kinds(1, 1, release="0.33.0", faults=[twice]) == set()


def test_a_message_to_the_wrong_rank_is_waited_for_all_the_same() -> None:
    """P1's message counts at D0: if decode goes, it goes after both writers' landings. It hangs, but it doesn't race."""
    assert kinds(2, 2, release="0.33.0", faults=["misroute-notice:write_done,from=P1,port=-1"]) == set()


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("ms", [0, 20])
def test_a_completion_before_its_data_orders_nothing(mode: str, ms: int) -> None:
    """mori#434: with `ms` 0 the bytes are there in time, and nobody can know it."""
    result, record = played(2, 2, release="0.33.0", mode=mode, faults=[f"early-completion:{mode},layer=3,ms={ms}"])
    assert result.outcome == ("corrupt" if ms else "ok")
    assert found(record) == {("use", "status"), ("free", "status")}


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_late_transfer_is_waited_for(mode: str) -> None:
    assert kinds(2, 2, release="0.33.0", mode=mode, faults=[f"delay-transfer:{mode},layer=3,ms=20"]) == set()


def test_a_transfer_that_is_sealed_short_races_with_nothing() -> None:
    """Layers that no session came in time for are never written: no landing, no race; the told ones are waited for."""
    result, world = run_world(resolve(build(load(FINDINGS / "late-handshake.toml"))))
    record = record_of(world)
    assert "sealed-short" in {finding.kind for finding in result.findings}
    assert (result.outcome, found(record)) == ("corrupt", set())


# -- free: does prefill keep its blocks until the NIC has read them? ------------------------------------------------


@pytest.mark.parametrize(("queue_pairs", "done", "race"), [
    (1, "last_layer", False), (2, "last_layer", True), (2, "all_layers", False),
])  # fmt: skip
def test_the_status_of_the_last_layer_speaks_for_one_queue_pair(queue_pairs: int, done: str, race: bool) -> None:
    overrides = {"read_barrier": "step", "read_done": done}
    got = kinds(2, 2, release="0.27.0", mode="read", rdma={"queue_pairs": queue_pairs}, overrides=overrides)
    assert got == ({("free", "queue")} if race else set())


@pytest.mark.parametrize(("acks", "race"), [("any", True), ("fan_in", False)])
def test_one_release_of_two_readers(acks: str, race: bool) -> None:
    got = kinds(2, 4, release="0.27.0", mode="read", overrides={"read_barrier": "step", "acks": acks})
    assert got == ({("free", "count")} if race else set())


def test_the_reaper_frees_without_word_of_the_read() -> None:
    """D1's release is lost, and prefill's timer frees what D1 read: only because reads are faster than timers it was over."""
    got = kinds(2, 2, release="0.33.0", mode="read", faults=["drop-notice:release,from=D1"])
    assert got == {("free", "timer")}


def test_the_reaper_may_free_what_was_released() -> None:
    """P TP4 → D TP2, up to 0.32.0: P1 and P3 are never released (F14). Those that were read were, before the timer fired."""
    result, record = played(4, 2, release="0.32.0", mode="read")
    assert (result.outcome, found(record)) == ("degraded", set())


def test_a_failed_read_is_released_while_others_are_under_way() -> None:
    """poll_transfer_batch looks no further than the first failed status, and the release follows (0.28.0 on)."""
    assert kinds(2, 2, release="0.33.0", mode="read", faults=["fail-transfer:read,layer=1"]) == {("free", "wait")}


@pytest.mark.parametrize(("release", "wait", "race"), [
    ("0.27.0", "all_statuses", False), ("0.33.0", "first_failure", True), ("0.33.0", "all_statuses", False),
])  # fmt: skip
def test_a_failed_write_frees_while_others_are_under_way(release: str, wait: str, race: bool) -> None:
    """Found by the write thread: the forward would raise. From 0.31.0 on the first failure ends the wait."""
    faults = ["fail-transfer:write,layer=1", "delay-notice:remote_blocks,ms=200"]
    assert kinds(2, 2, release=release, overrides={"write_wait": wait}, faults=faults) == ({("free", "wait")} if race else set())


def test_a_status_that_never_comes() -> None:
    """The layer's barrier gives up after a transfer timeout and goes on; prefill hears nothing, and its reaper frees."""
    got = kinds(2, 2, release="0.28.0", mode="read", faults=["lose-completion:read,layer=3"])
    assert got == {("use", "barrier"), ("free", "wait")}


# -- reuse: are decode's blocks given away only when nothing can land in them any more? ------------------------------


def test_one_writer_s_failure_gives_blocks_away_that_another_may_write() -> None:
    """N15: P1 never hears of the blocks and says so, and decode frees them; nobody waits for P0."""
    got = kinds(2, 1, release="0.33.0", model=GQA, faults=["drop-notice:remote_blocks,to=P1"])
    assert got == {("reuse", "count")}


def test_decode_s_own_timer_gives_blocks_away() -> None:
    """`reference` saves itself from a lost message by a timer, and so can't know that nothing is written any more."""
    assert kinds(2, 2, release="reference", faults=["drop-notice:write_done,from=P1"]) == {("reuse", "timer")}


@pytest.mark.parametrize(("release", "race"), [("0.25.1", True), ("0.33.0", False)])
def test_blocks_announced_by_one_who_does_not_wait(release: str, race: bool) -> None:
    """Up to 0.25.1 decode announces its whole table when it needs nothing, and frees it when it likes (vllm#58108)."""
    got = kinds(1, 1, release=release, requests=[{"decode_hit_blocks": 16, "external_zero": True}])
    assert got == ({("reuse", "timer")} if race else set())


# -- no verdict hangs on times -------------------------------------------------------------------------------------


def drafts(release: str, mode: str, seeds: int, faults: bool) -> Any:
    swarm = Swarm(features=features_of(None, True, faults), pins={"release": release, "mode": mode})
    for seed in range(seeds):
        try:
            yield seed, swarm.draft(seed)
        except (InputError, FaultSyntaxError):
            continue


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("release", ["0.27.0", "0.30.0", "0.33.0", "reference"])
def test_races_are_the_same_on_every_fabric(release: str, mode: str) -> None:
    """Runs without faults, from wires of no latency to 115 µs a read: the same races, rank by rank; `reference` has none."""
    some = 0
    for seed, draft in drafts(release, mode, 25, faults=False):
        got = []
        for fabric in ("loopback", "cx7", "thor2"):
            try:
                _, world = run_world(resolve(build({**draft, "fabric": fabric})))
            except InputError:
                break
            record = record_of(world)
            got.append({
                (r.what, r.missing, r.request, r.source, r.target) for r in races(record.history, plan_of(record))
            })  # fmt: skip
        assert all(each == got[0] for each in got), f"seed {seed}"
        some += any(got)
        assert release != "reference" or not any(got), f"seed {seed}"
    assert some or (release, mode) != ("0.27.0", "read")


@pytest.mark.parametrize("release", RELEASES)
def test_what_comes_too_late_in_read_is_a_race(release: str) -> None:
    """Cells that were missing when decode used them and that landed afterwards: each such request has a use in a race."""
    late = 0
    for seed, draft in drafts(release, "read", 60, faults=True):
        try:
            _, world = run_world(resolve(build(draft)))
        except InputError:
            continue
        record = record_of(world)
        short = {
            course.index for course in record.courses
            if course.at_go and sum(c.covered for c in course.at_go) < sum(c.covered for c in course.at_end)
        }  # fmt: skip
        late += len(short)
        assert short <= {r.request for r in races(record.history, plan_of(record)) if r.what == "use"}, f"seed {seed}"
    assert late > 0 or release not in NO_BARRIER


# -- the count, against all orders of arrival ----------------------------------------------------------------------

MESSAGES = st.lists(st.tuples(st.sampled_from(["P0", "P1", "P2"]), st.sampled_from(["D0", "D1"])), min_size=1, max_size=6)


@given(messages=MESSAGES, wanted=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_the_count_against_every_order_of_arrival(messages: list[tuple[str, str]], wanted: tuple[int, int]) -> None:
    """A landing is before go exactly if its writer has a message before go in whatever order messages arrive."""
    needs = dict(zip(("D0", "D1"), wanted, strict=True))
    before: set[str] = {"P0", "P1", "P2"}
    goes = False
    for order in set(itertools.permutations(messages)):
        heard: dict[str, int] = {"D0": 0, "D1": 0}
        for position, (_, rank) in enumerate(order):
            heard[rank] += 1
            if sum(heard[name] // needs[name] for name in heard) >= 2:
                before &= {sender for sender, _ in order[: position + 1]}
                goes = True
                break
    if not goes:
        return
    rows: list[Row] = [(1, "wrote", name, "D0", 0, 0, None) for name in ("P0", "P1", "P2")]
    rows += [(2, "settled", name, "", 0, -1, None) for name in ("P0", "P1", "P2")]
    rows += [(3, "write_done", rank, sender, 0, -1, Counted(needs[rank])) for sender, rank in messages]
    rows.append((4, "go", "D", "", 0, -1, None))
    history = History()
    history.rows = rows
    users = {0: ("D0", "D1")}
    plan = Plan(mode="write", needed=users, users=users, holders={0: ("P0", "P1", "P2")})
    assert {race.source for race in races(history, plan)} == {"P0", "P1", "P2"} - before


# -- what is not seen, what is expected ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("blind", ["settled", "go", "freed", "released", "fault_fired"])
def test_a_tier_that_does_not_see_order_does_not_pass(mode: str, blind: str) -> None:
    for release in ("0.27.0", "0.33.0"):
        _, record = played(2, 2, release=release, mode=mode)
        plan = msgspec.structs.replace(plan_of(record), observed=frozenset(KINDS) - {blind})
        assert {check.name: check.verdict for check in check_all(record.history, plan)}["no-race"] == "unknown"


def test_check_fails_on_a_race_unless_it_is_expected() -> None:
    lucky = run(build({"release": "0.27.0", "mode": "read", "fabric": "loopback", "model": MLA}))
    clean = run(build({"release": "0.33.0", "mode": "read", "fabric": "loopback", "model": MLA}))
    assert (lucky.outcome, clean.outcome) == ("ok", "ok")
    assert judge_run(lucky).text.startswith("a race: nothing orders layer 3 of request 0 from P0 into D0 and go")
    assert judge_run(lucky, Expect(outcome="ok")).status == "fail"
    assert judge_run(lucky, Expect(race=False), check=False).status == "fail"
    assert judge_run(lucky, Expect(outcome="ok", race=True)) == PASS
    assert judge_run(lucky, Expect(outcome="ok"), check=False) == PASS
    assert judge_run(clean) == PASS
    assert judge_run(clean, Expect(race=True), check=False).reasons == ("expected a race, found none",)
    assert summary_line([lucky, clean]).startswith("0.27.0: 1 of 2 pairings are not good")
    assert summary_line([lucky]).endswith("(READ 1 ok, 1 with a race)")


def test_every_axiom_has_a_source() -> None:
    assert len({axiom.name for axiom in AXIOMS}) == len(AXIOMS)
    assert all(axiom.text and axiom.source for axiom in AXIOMS)


def test_the_page_has_every_axiom() -> None:
    page = (Path(__file__).parents[2] / "docs" / "order.md").read_text(encoding="utf-8")
    assert [f"| {axiom.name} | {axiom.text} | {axiom.source} |" in page for axiom in AXIOMS] == [True] * len(AXIOMS)


def test_a_flip_shows_the_cause_of_a_race_in_a_run_that_is_ok() -> None:
    shown = explain(build({"release": "0.27.0", "mode": "read", "fabric": "loopback", "model": "layers=2,mla=64+16"}))
    assert shown.outcome == "ok"
    assert shown.remedies
    heals = [text for remedy in shown.remedies.found if remedy.effect == "heals" for text in remedy.flips]
    assert any("read_barrier = step" in text for text in heals)


def test_a_write_task_that_raises_leaves_others_under_way() -> None:
    """A layer of states can't be sliced for an unknown size: the first layer is posted, the second raises, and P1 reports."""
    result, world = run_world(resolve(build(load(FINDINGS / "state-unknown-size.toml"))))
    assert ("free", "wait") in found(record_of(world))
    assert "transfer-failed" in {finding.kind for finding in result.findings}


ORDERED_BY: list[tuple[int, int, dict[str, Any], dict[str, str]]] = [
    (2, 2, {"release": "0.28.0", "mode": "read", "decode": {"tp": 2, "cuda_graphs": "full"}}, {"read_barrier": "step"}),
    (2, 2, {"release": "reference", "mode": "read", "rdma": {"queue_pairs": 2}, "overrides": {"read_done": "last_layer"}},
     {"read_done": "all_layers"}),
    (2, 4, {"release": "reference", "mode": "read", "overrides": {"acks": "any"}}, {"acks": "fan_in"}),
    (2, 4, {"release": "reference", "mode": "read", "overrides": {"release_acks": "one"}}, {"release_acks": "decode_size"}),
    (4, 2, {"release": "0.33.0", "model": GQA, "overrides": {"completion": "first_message"}}, {"completion": "all_writers"}),
    (2, 2, {"release": "0.33.0", "faults": ["fail-transfer:write,layer=1", "delay-notice:remote_blocks,ms=200"]},
     {"write_wait": "all_statuses"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ptp", "dtp", "fields", "better"), ORDERED_BY, ids=lambda each: "-".join(each) if type(each) is dict else ""
)
def test_what_would_order_it_does(ptp: int, dtp: int, fields: dict[str, Any], better: dict[str, str]) -> None:
    """Each policy that a finding names, flipped: no race is left."""
    result, _ = played(ptp, dtp, **fields)
    causes = [cause for finding in result.findings if finding.kind == "race" for cause in finding.causes]
    assert [cause for cause in causes if cause.endswith("would order it")] == [
        " and ".join(f"{field} = {policy}" for field, policy in better.items()) + " would order it"
    ]
    assert kinds(ptp, dtp, **{**fields, "overrides": fields.get("overrides", {}) | better}) == set()


def test_a_read_of_another_engine_s_blocks_says_nothing_of_those_that_are_freed() -> None:
    """DP rank 0 is read whatever the leg says: what the reaper of DP rank 1 frees was not read by anybody."""
    fields = {"prefill": {"tp": 1, "dp": 2}, "requests": [{"prefill_dp": 1}], "overrides": {"read_dp": "zero"}}
    result, record = played(1, 1, release="reference", mode="read", **fields)
    assert (result.outcome, found(record)) == ("corrupt", set())
