"""The registry of policies: types and names agree, and a policy that is exchanged shows first in what its field decides."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

from kvcover import InputError, build, load, resolve
from kvcover.sim.kernel.clock import Clock
from kvcover.sim.kernel.events import KINDS
from kvcover.sim.kernel.history import Row
from kvcover.sim.moriio import prefill
from kvcover.sim.moriio.decode_rank import DecodeRank
from kvcover.sim.moriio.read_step import ReadStep
from kvcover.sim.moriio.transfer import response_of
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import PUBLISHED, RELEASES, ConnectorRelease, get_release
from kvcover.sim.scenario.endpoint import Endpoint
from kvcover.sim.scenario.routers import ROUTERS
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.search.swarm import Swarm, features_of
from kvcover.sim.world import World
from tests.claims.test_findings import FOLDER

Draft = dict[str, Any]
NAMES = ("name", "date", "toy_proxy")


def test_the_types_are_the_registry() -> None:
    types = typing.get_type_hints(ConnectorRelease)
    assert [name for name in types if name not in NAMES] == list(FIELDS)
    for field, subject in FIELDS.items():
        assert typing.get_args(types[field]) == tuple(subject.policies), field


def test_a_record_is_plain_data_of_known_names() -> None:
    for record in RELEASES.values():
        assert msgspec.convert(msgspec.to_builtins(record), ConnectorRelease) == record
        assert record.toy_proxy in ROUTERS
    assert [name for name in RELEASES if name not in PUBLISHED] == ["reference"]


def test_every_policy_says_what_it_means() -> None:
    for field, subject in FIELDS.items():
        texts = [policy.text for policy in subject.policies.values()]
        assert all(texts) and len(set(texts)) == len(texts), field
        calls = {policy.call is None for policy in subject.policies.values()}
        assert len(calls) == 1, f"{field}: some of its policies are functions, some are names"
        assert subject.decides and set(subject.decides) <= set(KINDS), field


# -- the first event that differs ------------------------------------------------------------------------------------

MLA, KV8 = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8"
STATES = "layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=2"
SLIDING = "layers=4,kv_heads=8,head_dim=8,window=32,full_every=2"
LAYERS_OF_TWO_KINDS = "layers=3,mla=64+16,kv_heads=8,head_dim=8,gqa_every=2"
SHORT = {"transfer_timeout_s": 1.5, "defer_timeout_s": 3.0, "recv_abort_timeout_s": 4.0}


def on(release: str, *faults: str, p: int = 2, d: int = 2, mode: str = "write", model: str = MLA, **fields: Any) -> Draft:
    """A small scenario; `prefill` and `decode` add to the TP sizes, `base` are overrides that both runs have."""
    sides = {name: {"tp": tp, **fields.pop(name, {})} for name, tp in (("prefill", p), ("decode", d))}
    base = fields.pop("base", {})
    return {"release": release, "mode": mode, "model": model, "prompt_tokens": 64, "fabric": "loopback", "timers": SHORT,
            "faults": list(faults), "overrides": base, **sides, **fields}  # fmt: skip


def read(release: str, *faults: str, **fields: Any) -> Draft:
    return on(release, *faults, mode="read", **fields)


def finding(name: str, release: str, **base: str) -> Draft:
    return {**load(FOLDER / f"{name}.toml"), "release": release, "overrides": base}


DROP, DROP_BOTH = "drop:remote_tp_size", ("drop:remote_tp_size@decode", "drop:tp_size@decode")
SLOW = "delay-transfer:read,to=D1,ms=50"
TWO_PODS: Draft = {"dp": 2, "pods": 2}
WIDE: Draft = {"router": "wide-ep", "p": 1, "d": 1}
AHEAD: Draft = {"lookahead_tokens": 1}
UNLIKE: Draft = {"prefill": {"layout": "interleaved"}, "decode": {"layout": "split"}, "model": KV8, "p": 1, "d": 1}
ZERO: Draft = {"requests": [{"external_zero": True}]}
PLAIN: Draft = {"requests": [{"plain": True}]}
LAST_PODS: dict[str, Any] = {
    "router": "wide-ep", "p": 1, "d": 1, "prefill": {"dp": 4, "pods": 2}, "decode": {"dp": 4, "pods": 2},
    "requests": [{"prefill_dp": 2, "decode_dp": 2}, {"prefill_dp": 2, "decode_dp": 0, "arrival_ns": 20_000_000}],
}  # fmt: skip
LAST_PODS_FAULTS = (
    "delay-notice:remote_blocks,ms=100,request=0", "drop:remote_hosts@prefill#1", "drop:remote_dp_size_local@prefill#1",
    "set:remote_dp_rank_override=false@decode#1",
)  # fmt: skip
# Scenarios in which the policies of a field can be told apart; each is run as it is, and with every other policy.
CASES: dict[str, list[Draft]] = {
    "peer_tp": [on("0.26.0"), on("0.27.0"), on("0.33.0", DROP, p=4), on("reference")],
    "unknown_tp_map": [on("0.27.0", DROP), on("0.27.0", DROP, base={"unknown_tp_map": "refused"}), on("0.27.0", "set:remote_tp_size=-1@prefill")],
    "unknown_tp_guard": [
        read("0.27.0", DROP_BOTH[0]), read("0.27.0", DROP_BOTH[0], base={"unknown_tp_guard": "refused"}),
        read("0.27.0", "set:remote_tp_size=-1@decode", base={"unknown_tp_map": "non_positive_is_own"}, model=KV8),
    ],
    "unknown_tp_states_read": [read("0.31.0", *DROP_BOTH, model=STATES), read("0.33.0", *DROP_BOTH, model=STATES)],
    "unknown_tp_states_write": [
        on("0.33.0", DROP, model=STATES), on("0.33.0", DROP, model=STATES, base={"unknown_tp_states_write": "zero_is_own"}),
    ],
    "transfer_id_missing": [on(release, "drop:transfer_id@prefill") for release in ("0.27.0", "0.28.0", "reference")],
    "null_id": [on(release, "set:transfer_id=null") for release in ("0.24.0", "0.27.0")],
    "address": [
        read(release, "stale-registration:prefill,port=8", router="vllm-router 0.1.17") for release in ("0.27.0", "0.28.0")
    ],
    "prefill_leg_read": [read(release, "drop:remote_engine_id@prefill") for release in ("0.27.0", "0.31.0")],
    "leg_error": [on(release, "drop:transfer_id@prefill") for release in ("0.27.0", "reference")],
    "unsupported": [on(release, prefill={"kv_dtype": "fp8"}) for release in ("0.33.0", "reference")],
    "cache_layouts": [
        on("0.24.0", model=KV8, prefill={"layout": "packed"}), on("0.28.0", prefill={"layout": "standard"}),
        on("0.33.0", prefill={"layout": "latent"}), on("reference", prefill={"layout": "standard"}),
        on("reference", model=KV8, prefill={"layout": "packed"}),
    ],
    "latents": [on("0.28.0"), on("0.29.0")],
    "hybrid_manager": [on(release, mode=mode, model=SLIDING) for release in ("0.29.0", "0.33.0") for mode in ("write", "read")],
    "mixed_layers": [on(release, model=LAYERS_OF_TWO_KINDS, p=1, d=1) for release in ("0.30.0", "0.33.0")],
    "states": [on(release, mode=mode, model=STATES) for release in ("0.30.0", "0.31.0", "0.33.0") for mode in ("write", "read")],
    "unfit_start": [on(release, model=SLIDING) for release in ("0.33.0", "reference")],
    "ports": [on(release, decode={"dp": 2}) for release in ("0.33.0", "reference")],
    "stage_ports": [on(release, decode={"pp": 2}, base={"unsupported": "not_checked"}) for release in ("0.33.0", "reference")],
    "pod_ports": [on(release, decode=TWO_PODS, **WIDE) for release in ("0.27.0", "0.28.0")],
    "dial": [
        on("0.27.0", DROP, p=1, d=1, decode={"dp": 2}), on("0.27.0", DROP, p=1, d=1, decode={"dp": 2}, base={"dial": "dp_plus_tp"}),
    ],
    "notify_ports": [on(release, prefill={"dp": 2}, base={"ports": "dp_times_tp_plus_tp"}) for release in ("0.33.0", "reference")],
    "pod_routing": [on(release, *LAST_PODS_FAULTS, **LAST_PODS) for release in ("0.27.0", "0.28.0", "0.31.0")],
    "match_write": [on(release, **PLAIN) for release in ("0.27.0", "0.33.0")],
    "blocks_ready_width": [on("0.27.0", p=4), on("0.33.0", p=4), on("0.33.0", "set:remote_tp_size=2@decode", p=4), on("reference", p=4)],
    "blocks_ready_gate": [on(release, "set:is_request_leader=false@decode") for release in ("0.27.0", "0.28.0")],
    "blocks_ready_pods": [
        on(release, prefill=TWO_PODS, base={"blocks_ready_gate": "none"}, **WIDE) for release in ("0.27.0", "0.28.0")
    ],
    "external_zero": [on(release, **ZERO) for release in ("0.25.1", "0.26.0", "0.33.0")],
    "early_release_acks": [on(release, "abort:0,at=before", p=1) for release in ("0.28.0", "0.33.0")],
    "write_map": [
        on("0.24.0", p=4), on("0.27.0", p=4), on("0.33.0", d=4),
        on("0.33.0", d=4, base={"write_map": "floor"}),
    ],
    "write_map_error": [on(release, "set:remote_tp_size=3@prefill") for release in ("0.27.0", "0.33.0")],
    "write_plan": [on("0.33.0", base={"write_map": "floor", "write_plan": plan}, **UNLIKE) for plan in ("head_slices", "local_strides")],
    "slice_heads": [finding("mixed-layers-and-pools", "0.33.0"), finding("mixed-layers-and-pools", "reference")],
    "advertised": [on("0.33.0", **UNLIKE), on("0.33.0", base={"advertised": "regions"}, **UNLIKE)],
    "write_pairing": [on(release, decode=AHEAD) for release in ("0.24.0", "0.27.0")],
    "write_clamp": [on(release, prefill=AHEAD) for release in ("0.31.0", "0.33.0")],
    "last_chunk": [on(release, prefill=AHEAD | {"max_tokens_per_step": 63}) for release in ("0.31.0", "0.33.0")],
    "plain_chunks": [on(release, prefill={"max_tokens_per_step": 16}, **PLAIN) for release in ("0.27.0", "0.28.0")],
    "blocks_ready_again": [on(release, "duplicate-notice:remote_blocks") for release in ("0.33.0", "reference")],
    "sealing": [finding("late-handshake", "0.33.0"), finding("late-handshake", "0.33.0", sealing="every_layer")],
    "write_wait": [
        on(release, "fail-transfer:write,layer=0", "delay-transfer:write,layer=1,ms=50", "delay-notice:remote_blocks,ms=20")
        for release in ("0.27.0", "0.33.0")
    ],
    "write_failure": [on(release, "fail-transfer:write", "delay-notice:remote_blocks,ms=20") for release in ("0.33.0", "reference")],
    "write_failure_in_forward": [on(release, "fail-transfer:write,layer=1") for release in ("0.33.0", "reference")],
    "expiry": [on(release, "drop-notice:remote_blocks") for release in ("0.27.0", "0.33.0")],
    "write_done_to": [on("0.27.0", p=4), on("0.33.0", d=4, base={"completion": "first_message"})],
    "reaper": [on(release, "set:remote_tp_size=4@prefill") for release in ("0.32.0", "0.33.0")],
    "early_ack": [on(release, "stop-at-prefill:0") for release in ("0.27.0", "0.28.0")],
    "completion": [on("0.33.0", p=4, model=KV8), on("0.33.0", p=4, model=KV8, base={"completion": "first_message"})],
    "write_failed_heard": [on("0.33.0", "drop-notice:remote_blocks"), on("0.27.0", "drop-notice:remote_blocks", base={"expiry": "write_failed"})],
    "decode_timer": [on(release, "drop-notice:write_done") for release in ("0.33.0", "reference")],
    "abort_waiting": [on(release, "abort:0,at=waiting,ms=1", "delay-notice:remote_blocks,ms=100") for release in ("0.33.0", "reference")],
    "late_report": [finding("notice-while-running", "0.33.0"), finding("notice-while-running", "reference")],
    "decode_leg_hold": [on(release, "set:do_remote_decode=true@decode") for release in ("0.27.0", "0.28.0", "reference")],
    "answer_blocks": [read(release, router="vllm-router 0.1.17") for release in ("0.29.0", "0.30.0")],
    "answer_dp": [read(release, router="vllm-router 0.1.17") for release in ("0.27.0", "0.28.0")],
    "windows": [finding("sliding-lookahead", "0.33.0"), finding("sliding-lookahead", "reference")],
    "match_read": [read(release, **PLAIN) for release in ("0.27.0", "0.33.0")],
    "external_zero_read": [read(release, **ZERO) for release in ("0.25.1", "0.26.0")],
    "abort_before_read": [read(release, "abort:0,at=before") for release in ("0.25.1", "0.26.0")],
    "empty_read": [read(release, **ZERO) for release in ("0.30.0", "0.31.0")],
    "block_ids": [read(release) for release in ("0.29.0", "0.30.0")]
    + [read("0.29.0", base={"answer_blocks": "groups"}), read("reference"), read("reference", base={"answer_blocks": "flat"})],
    "block_bounds": [
        read("0.27.0", "set:remote_block_ids=[90,91,92,93]@decode"), read("0.31.0", "set:remote_block_ids=[[90,91,92,93]]@decode"),
    ],
    "read_map": [read("0.24.0", p=4), read("0.27.0", p=4), read("reference", p=4, model=KV8), read("reference", p=4, model=KV8, base={"read_map": "floor"})],
    "read_flex": [read("0.27.0", d=1), read("0.27.0", d=1, base={"read_flex": "none"})],
    "read_dp": [read("0.27.0", p=1, d=1, prefill={"dp": 2}, base={"read_dp": policy}) for policy in ("zero", "param")],
    "read_handshake": [
        *(read(release, "late-rank:P1,ms=9000") for release in ("0.26.0", "0.27.0", "reference")),
    ],
    "read_queue": [finding("one-read-a-step", "0.26.0"), finding("one-read-a-step", "0.26.0", read_queue="all")],
    "read_guard": [read("0.24.0", p=4, model=KV8), read("0.25.1", p=4, model=KV8), read("0.33.0", p=4, model=KV8)],
    "read_plan": [read("0.32.0", base={"advertised": "layouts"}, **UNLIKE), read("0.33.0", base={"read_guard": "none"}, **UNLIKE), read("reference", **UNLIKE)],
    "read_pairing": [
        read(release, requests=[{"decode_hit_blocks": 2, "suffix_only": True}])
        for release in ("0.24.0", "0.26.0", "0.30.0", "0.33.0", "reference")
    ],
    "sq_retry": [read(release, "sq-full:read") for release in ("0.25.1", "0.26.0")],
    "read_barrier": [
        read(release, "delay-transfer:read,ms=9", **more)
        for release in ("0.27.0", "0.30.0", "0.32.0", "0.33.0", "reference")
        for more in ({}, {"decode": {"cuda_graphs": "full"}})
    ] + [read(release, "delay-transfer:read,ms=9000") for release in ("0.33.0", "reference")],
    "read_failure": [read(release, "fail-transfer:read") for release in ("0.30.0", "0.31.0")],
    "failed_blocks": [finding("sliding-failed-read", "0.33.0"), finding("sliding-failed-read", "reference")],
    "failed_states": [
        read("0.33.0", "fail-transfer:read", model=STATES, base={"failed_blocks": "any"}),
        read("reference", "fail-transfer:read", model=STATES),
    ],
    "read_done": [read(release, "delay-transfer:read,layer=0,ms=50") for release in ("0.27.0", "0.28.0")],
    "recv_abort": [read(release, "delay-transfer:read,ms=9000") for release in ("0.27.0", "0.28.0")],
    "release_to": [read(release, p=4) for release in ("0.24.0", "0.27.0", "0.33.0")],
    "release_port": [
        *(read("0.27.0", p=1, d=1, prefill={"dp": 2}, base={"release_port": policy}) for policy in ("tp", "raw")),
        *(read(release, DROP, p=1, d=1, prefill={"dp": 2}) for release in ("0.27.0", "0.33.0")),
    ],
    "release_acks": [read("0.27.0", SLOW, d=4, base={"release_acks": policy}) for policy in ("one", "decode_size")],
    "acks": [read("0.27.0", SLOW, d=4, base={"acks": policy}) for policy in ("any", "fan_in")],
}  # fmt: skip
SEEDS = 10
SWARM = Swarm(features=tuple(name for name in features_of(None, full=True, faults=True) if name not in ("overrides", "workload")))


def first_of_all(clock: Clock) -> None:
    """Ties in the order of their scheduling, so that one event more or less moves no other."""
    count = 4096
    clock._ties = list(range(clock._drawn + count, clock._drawn, -1))
    clock._drawn += count


def history(draft: Draft) -> list[Row]:
    world = World(resolve(msgspec.convert(draft, Scenario)))
    world.run()
    return world.history.rows


@cache
def corpus() -> list[tuple[Draft, list[Row]]]:
    """The scenarios of all fields, and some of a swarm of all releases and both modes, with their histories."""
    by_hand = {str(draft): msgspec.to_builtins(build(draft)) for drafts in CASES.values() for draft in drafts}
    found = [(draft, history(draft)) for draft in by_hand.values()]
    for seed in range(SEEDS):
        draft = SWARM.draft(seed)
        try:
            found.append((draft, history(draft)))
        except InputError:
            continue
    return [(draft, rows) for draft, rows in found if len(rows) < 2000]


def first_difference(before: list[Row], after: list[Row]) -> set[str]:
    """Kinds of the events by which two histories first differ, at the first instant that has one of its own in either.

    There are two where one took the place of the other: what a policy decides, and what happens instead.
    """
    here = there = 0
    while here < len(before) or there < len(after):
        now = min(rows[at][0] for rows, at in ((before, here), (after, there)) if at < len(rows))
        mine, theirs = instant(before, here, now), instant(after, there, now)
        own = [[row for row in rows if row not in others] for rows, others in ((mine, theirs), (theirs, mine))]
        if any(own) or len(mine) != len(theirs):
            return {rows[0][1] for rows in own if rows} or {row[1] for row in (*mine, *theirs)}
        here, there = here + len(mine), there + len(theirs)
    return set()


def instant(rows: list[Row], start: int, now: int) -> list[Row]:
    end = start
    while end < len(rows) and rows[end][0] == now:
        end += 1
    return rows[start:end]


def exchanged(field: str, draft: Draft) -> Iterator[tuple[str, Draft]]:
    """The draft with each policy of the field that one of its engines does not have."""
    for policy in FIELDS[field].policies:
        overrides = {**draft.get("overrides", {}), field: policy}
        names = {draft["release"], draft.get("decode_release") or draft["release"]}
        try:
            records = [get_release(name).overridden(draft.get("overrides", {})) for name in names]
            [get_release(name).overridden(overrides) for name in names]
        except InputError:
            continue  # makes no sense with the other policies
        if any(getattr(record, field) != policy for record in records):
            yield policy, {**draft, "overrides": overrides}


def undeclared(field: str, drafts: list[tuple[Draft, list[Row]]]) -> tuple[list[str], set[str]]:
    """First differences of no kind that the field declares, and the policies that made a difference."""
    found, shown = [], set()
    for draft, before in drafts:
        for policy, other in exchanged(field, draft):
            try:
                kinds = first_difference(before, history(other))
            except InputError:
                continue  # another pool or table, in which the scenario's blocks don't fit
            if kinds:
                shown.add(policy)
                if not kinds & set(FIELDS[field].decides):
                    found.append(f"{policy}: {kinds}\n{other}")
    return found, shown


@pytest.mark.parametrize("field", FIELDS)
def test_what_differs_first_is_what_the_field_decides(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "_draw", first_of_all)
    found, shown = undeclared(field, corpus())
    assert not found, found[0]
    assert shown == set(FIELDS[field].policies)


def expiry_decides_what_decode_hears(patch: pytest.MonkeyPatch) -> None:
    real = DecodeRank.on_write_failed

    def hears(self: DecodeRank, transfer_id: Any, transfer: Any, sender: str) -> None:
        if self.me.release.expiry == "silent":
            self.poison("write_failed", transfer, sender)
        else:
            real(self, transfer_id, transfer, sender)

    patch.setattr(DecodeRank, "on_write_failed", hears)


def a_missing_id_decides_what_is_answered(patch: pytest.MonkeyPatch) -> None:
    def answers(params: Any, me: Endpoint, *args: Any) -> dict[str, Any]:
        answer = response_of(params, me, *args)
        return answer | ({"remote_dp_rank": 0} if me.release.transfer_id_missing != "key_error" else {})

    patch.setattr(prefill, "response_of", answers)


def the_pairing_decides_who_dials(patch: pytest.MonkeyPatch) -> None:
    def without(self: ReadStep) -> bool:
        return self.me.release.read_pairing in ("suffix", "by_position")

    patch.setattr(ReadStep, "_releases_without_session", without)


@pytest.mark.parametrize(("field", "offence"), [
    ("expiry", expiry_decides_what_decode_hears),
    ("transfer_id_missing", a_missing_id_decides_what_is_answered),
    ("read_pairing", the_pairing_decides_who_dials),
])  # fmt: skip
def test_a_second_subject_is_seen(field: str, offence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier releases of this project had: each of these fields decided something else as well."""
    monkeypatch.setattr(Clock, "_draw", first_of_all)
    offence(monkeypatch)
    found, _ = undeclared(field, [(draft, history(draft)) for draft, _ in corpus()])
    assert found


def test_every_field_has_cases() -> None:
    assert list(CASES) == list(FIELDS)
