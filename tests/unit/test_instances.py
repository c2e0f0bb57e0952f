"""Several instances a side: who is chosen, what comes of it, and that one instance is as it always was."""

from __future__ import annotations

import tomllib
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, build, resolve, run, run_world
from kvcover.sim.errors import TierError
from kvcover.sim.scenario.routers import ROUTERS, get_router
from kvcover.sim.tiers import load_tier

CHOICES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parents[1] / "data" / "router_choices.toml").read_text())["choice"]
PROXIES = [choice for choice in CHOICES if "options" not in choice]
TURNS = [choice for choice in CHOICES if "options" in choice]
TWO: dict[str, Any] = {"model": "layers=2,mla=64+16", "fabric": "loopback"}


def two_by_two(**more: Any) -> dict[str, Any]:
    return TWO | {"prefill": {"dp": 2, "instances": 2}, "decode": {"dp": 2, "instances": 2}} | more


def slot(letter: str, instance: int, rank: int | None) -> str:
    return f"{letter}{instance}" + ("" if rank is None else f".{rank}")


@pytest.mark.parametrize("choice", PROXIES, ids=[choice["router"] for choice in PROXIES])
def test_slots_are_chosen_as_the_real_proxy_chose_them(choice: dict[str, Any]) -> None:
    """Where it names no DP rank for decode, the engine takes one."""
    router, sizes = get_router("toy-proxy", choice["router"].split()[1]), (2, 2)
    for index, pair in enumerate(choice["order"]):
        prefill, decode = router.choose(index, sizes, sizes)
        rank = None if "." not in pair.split()[1] else prefill.dp if router.decode_follows else decode.dp
        assert f"{slot('P', *prefill)} {slot('D', decode.instance, rank)}" == pair


def test_two_round_robins_of_one_router_never_part() -> None:
    """Seen of the real vllm-router: its two counters go in step, so that half of all pairs of instances never meet."""
    assert len(TURNS) == 3
    for choice in TURNS:
        pairs = Counter(tuple(name[1] for name in pair.split()) for pair in choice["order"])
        assert len(pairs) == 2, choice["router"]


@pytest.mark.parametrize(("release", "hit"), [("0.25.1", {0, 3}), ("0.26.0", {0, 1, 2, 3}), ("0.33.0", {0, 1, 2, 3})])
def test_one_number_for_instance_and_rank_leaves_half_of_the_slots_alone(release: str, hit: set[int]) -> None:
    """The toy proxy up to 0.25.1: two instances of two ranks, and each has one rank that is never asked."""
    result = run(build(two_by_two(release=release, requests=32)))
    assert (result.outcome, result.coverage) == ("ok", 1.0)
    assert {int(name[1]) for name in result.sets.prefill_told or ()} == hit
    told = {finding.kind: finding.text for finding in result.findings}
    if hit == {0, 3}:
        assert told["unhit-slot"] == "none of 32 requests went to P1, P2"
    else:
        assert told["unmet-pairs"].startswith("4 of 16 pairs of slots met in 32 requests") or release == "0.26.0"
    assert set(told) <= {"unhit-slot", "unmet-pairs"}


def test_too_few_requests_tell_nothing() -> None:
    result = run(build(two_by_two(release="0.25.1", requests=3)))
    assert result.findings == []


@pytest.mark.parametrize("sizes", list(product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2))))
def test_a_router_of_which_nothing_is_known_lets_all_pairs_meet(sizes: tuple[int, int, int, int]) -> None:
    prefill, decode = sizes[:2], sizes[2:]
    count = prefill[0] * prefill[1] * decode[0] * decode[1]
    router = ROUTERS["vllm-router 0.1.16"]
    assert len({router.choose(index, prefill, decode) for index in range(count)}) == count or prefill[0] == decode[0] == 1


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("release", ["0.24.0", "0.27.0", "0.33.0", "reference"])
def test_two_and_two_are_as_good_as_one_and_one(release: str, mode: str) -> None:
    """Each prefill instance writes to both decode instances, of unlike hosts and like ports."""
    fields: dict[str, Any] = TWO | {
        "release": release,
        "mode": mode,
        "router": "vllm-router 0.1.16",
        "workload": {"concurrency": 1},
    }
    one = run(build(fields | {"prefill": {"tp": 2}, "decode": {"tp": 2}, "requests": 8}))
    four = run(build(fields | {"prefill": {"tp": 2, "instances": 2}, "decode": {"tp": 2, "instances": 2}, "requests": 8}))
    assert four.by_request == one.by_request
    assert [finding.kind for finding in four.findings] == [finding.kind for finding in one.findings]
    if one.outcome == "ok":
        assert [rank.coverage for rank in four.by_rank] == [1.0] * 4


def test_the_rank_collapse_is_in_every_instance() -> None:
    fields = {"release": "0.26.0", "prefill": {"tp": 2, "instances": 2}, "decode": {"tp": 2, "instances": 2}, "requests": 4}
    result = run(build(TWO | fields))
    assert [(rank.dp, rank.tp, rank.coverage) for rank in result.by_rank] == [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 1.0), (1, 1, 0.0)]
    assert "P1.1 dialled port 7301, bound by D1.0, not D1.1" in [finding.text for finding in result.findings]
    assert result.decode == {"tp": 2, "dp": 1, "instances": 2}


def test_a_request_says_where_it_goes() -> None:
    requests = [{"prefill_instance": 1, "decode_instance": 0}, {"prefill_instance": 0, "decode_instance": 1, "decode_dp": 1}]
    setup = resolve(build(two_by_two(requests=requests, router="vllm-router 0.1.17")))
    assert [(request.prefill_dp, request.decode_dp) for request in setup.requests] == [(2, 0), (0, 3)]
    _, world = run_world(setup)
    assert world.legs[1, "prefill"]["remote_dp_rank"] == 1, "within its instance"
    assert world.legs[1, "prefill"]["remote_dp_size"] == 2
    assert [request.prefill_dp for request in resolve(build({"requests": [{}, {}], "prefill": {"dp": 2}})).requests] == [0, 1]


def test_hosts_and_ports_are_each_instances_own() -> None:
    setup = resolve(build(two_by_two(prefill={"dp": 2, "pods": 2, "instances": 2}, release="0.33.0")))
    assert setup.prefill.hosts == ("10.0.0.1", "10.0.0.1-pod1", "10.0.0.1-instance1", "10.0.0.1-instance1-pod1")
    assert [setup.prefill.host_of(dp) for dp in range(4)] == ["10.0.0.1", "10.0.0.1", "10.0.0.1-instance1", "10.0.0.1-instance1"]


def test_a_forgotten_instance_gets_no_requests() -> None:
    """Its heartbeats stopped; of two instances the other one takes what would have gone to it, of one nobody."""
    late = [{"arrival_ns": 0}, {"arrival_ns": 9_000_000_000}]
    fields = TWO | {"router": "vllm-router 0.1.17", "requests": late, "faults": ["stop-heartbeat:decode,ms=1000"]}
    to_first = [request | {"decode_instance": 0} for request in late]
    assert run(build(fields)).by_request == ["ok", "failed"]
    result = run(build(fields | {"decode": {"instances": 2}, "requests": to_first}))
    assert result.by_request == ["ok", "ok"]
    assert [rank.coverage for rank in result.by_rank] == [1.0, 1.0], "one request each"
    assert result.faults[0].fired == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": {"instances": 0}}, "prefill.instances: 0 is wrong"),
        ({"prefill": {"instances": 16, "dp": 17}}, "prefill.instances: 16 instances of 17 DP ranks are more than 256 in all"),
        ({"requests": [{"decode_instance": 1}]}, "requests[0].decode_instance: there is no instance 1; use 0 to 0"),
        ({"decode": {"instances": 2}, "requests": [{"decode_instance": 1, "decode_dp": 1}]}, "decode_dp: 1 is no DP rank"),
    ],
)
def test_bad_input(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(build(fields))
    assert message in str(error.value)


@pytest.mark.parametrize("fields", [{"prefill": {"instances": 2}}, {"requests": [{"decode_instance": 0}]}])
def test_the_connector_tier_refuses_them_by_name(fields: dict[str, Any]) -> None:
    from kvcover.real_backend.tiers.translate import to_trial

    with pytest.raises(TierError, match=r"instance.*can't be done on the connector tier"):
        to_trial(build(fields))
    assert load_tier("model").name == "model"
