"""Key faults that copy a value, from the other leg or from the request before, and which requests a fault acts on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcover import build, resolve, run, run_world
from kvcover.faults import FaultSyntaxError, Injector, parse_fault
from kvcover.real_backend.tiers.translate import to_trial

SIZES: dict[str, Any] = {"model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 4}, "release": "0.33.0"}
MISSING = object()


def values(key: str, *faults: str, **fields: Any) -> dict[str, list[Any]]:
    """What each request's legs carry under a key in the model, MISSING where it is absent."""
    _, world = run_world(resolve(build(SIZES | fields | {"faults": list(faults)})))
    count = len(world.transfers)
    return {leg: [world.legs[n, leg].get(key, MISSING) for n in range(count)] for leg in ("prefill", "decode")}


# -- swap --------------------------------------------------------------------------------------------------------


def test_swap_exchanges_the_legs() -> None:
    """The prefill leg names decode's size, 4, and the decode leg prefill's, 2; then the reverse."""
    assert values("remote_tp_size") == {"prefill": [4], "decode": [2]}
    assert values("remote_tp_size", "swap:remote_tp_size") == {"prefill": [2], "decode": [4]}
    assert values("remote_tp_size", "swap:remote_tp_size@prefill") == {"prefill": [2], "decode": [2]}
    assert values("remote_tp_size", "swap:remote_tp_size@decode") == {"prefill": [4], "decode": [4]}


def test_swap_makes_a_key_missing_where_the_other_leg_has_none() -> None:
    """The toy proxy pins the decode leg of several prefill DP ranks, and no prefill leg."""
    sizes = {"prefill": {"dp": 2}, "decode": {}, "requests": [{"prefill_dp": 1}]}
    assert values("remote_dp_rank", **sizes) == {"prefill": [MISSING], "decode": [1]}
    assert values("remote_dp_rank", "swap:remote_dp_rank", **sizes) == {"prefill": [1], "decode": [MISSING]}


def test_swap_takes_what_the_router_wrote_and_not_what_another_fault_made_of_it() -> None:
    assert values("remote_tp_size", "set:remote_tp_size=7@decode", "swap:remote_tp_size") == {"prefill": [2], "decode": [4]}


@pytest.mark.parametrize("router", ["toy-proxy", "vllm-router 0.1.17"])
def test_swap_in_read_gives_prefill_what_decode_is_sent_without_an_answer(router: str) -> None:
    """Both routers copy the id from prefill's answer, which isn't there when its leg leaves; decode gets prefill's, as ever."""
    legs = values("transfer_id", "swap:transfer_id", router=router, mode="read", prefill={"tp": 4})
    assert legs == {"prefill": [MISSING], "decode": ["tx-0"]}


def test_swap_of_equal_values_is_vacuous_and_says_why() -> None:
    result = run(build(SIZES | {"faults": ["swap:transfer_id"]}))
    assert result.outcome == "vacuous"
    assert "the same value on both legs" in result.findings[0].causes[0]


# -- stale -------------------------------------------------------------------------------------------------------


def test_stale_is_the_value_of_the_request_before() -> None:
    result, world = run_world(resolve(build(SIZES | {"requests": 3, "faults": ["stale:transfer_id"]})))
    for leg in ("prefill", "decode"):
        assert [world.legs[n, leg]["transfer_id"] for n in range(3)] == ["tx-0", "tx-0", "tx-1"]
    assert result.faults[0].fired == 4, "two legs of two requests; the first has no predecessor"


def test_stale_of_one_request_is_vacuous() -> None:
    assert run(build(SIZES | {"faults": ["stale:transfer_id"]})).outcome == "vacuous"


def test_stale_is_missing_where_it_was_missing_before() -> None:
    """Request 1 of a plain one: the leg before said nothing at all."""
    requests = [{"plain": True}, {}]
    assert values("transfer_id", "stale:transfer_id@decode", requests=requests)["decode"] == [MISSING, MISSING]


def test_stale_block_ids_in_read_are_another_prompts_blocks() -> None:
    """vllm#52234: a stale reference answers with another prompt's KV. All of request 1's cells are wrong, none of 0's."""
    sizes = {"prefill": {"tp": 2}, "decode": {"tp": 2}, "mode": "read", "fabric": "loopback"}
    requests = [{}, {"arrival_ns": 1_000_000_000}]
    result = run(build(SIZES | sizes | {"requests": requests, "faults": ["stale:remote_block_ids@decode"]}))
    assert result.by_request == ["ok", "corrupt"]
    assert (result.coverage, result.wrong) == (0.5, 0.5)


# -- which requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["drop:k", "set:k=9", "rename:k=n", "swap:k", "stale:k"])
@pytest.mark.parametrize(
    ("suffix", "hit"), [("", {0, 1, 2, 3, 4}), ("#0#2", {0, 2}), ("#2+", {2, 3, 4}), ("#0#3+", {0, 3, 4}), ("@decode#4+", {4})]
)
def test_from_a_request_on(body: str, suffix: str, hit: set[int]) -> None:
    """Every key fault changes exactly the named requests; stale never the first."""
    fault = parse_fault(body + suffix)
    injector = Injector([fault])
    changed = {n for n in range(5) if injector.params({"k": n}, "decode", n, {"k": -1})[1]}
    assert changed == (hit - {0} if body == "stale:k" else hit)
    assert parse_fault(str(fault)) == fault


def test_tables() -> None:
    table = {"kind": "stale", "key": "transfer_id", "leg": "decode", "requests": [0], "since": 2}
    scenario = build(SIZES | {"requests": 3, "faults": [table, {"kind": "swap", "key": "remote_tp_size"}]})
    assert [str(fault) for fault in resolve(scenario).faults] == ["stale:transfer_id@decode#0#2+", "swap:remote_tp_size"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("swap:", "use swap:KEY"),
        ("swap:a=1", "use swap:KEY"),
        ("stale:a@decod", "use @decode"),
        ("stal:a", "did you mean 'stale'"),
        ("swop:a", "did you mean 'swap'"),
        ("drop:a#2++", "or #2+ for all from 2 on"),
        ("drop:a#+", "or #2+ for all from 2 on"),
        ("drop:a#2+#4+", "write #2+ alone"),
        ("drop:a#3#2+", "leave out one of them"),
        ("set:a=x#2+", '"x"'),
    ],
)
def test_bad_syntax_names_the_right_one(text: str, words: str) -> None:
    with pytest.raises(FaultSyntaxError) as error:
        parse_fault(text)
    assert words in str(error.value)


# -- the other tiers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("fault", ["swap:remote_tp_size", "swap:transfer_id", "stale:transfer_id#1+", "stale:transfer_id@decode"])
def test_the_connector_tier_sends_the_same_legs(fault: str, mode: str) -> None:
    """Compared after prefill's answers, which differ, are replaced by the same one."""
    scenario = build(SIZES | {"mode": mode, "fabric": "loopback", "requests": 2, "faults": [fault]})
    trial = to_trial(scenario)
    _, world = run_world(resolve(scenario))
    for n, sent in enumerate(trial.legs):
        answer = {"transfer_id": world.transfers[n].router_id} if mode == "read" else {}
        legs = {"prefill": sent.prefill, "decode": sent.decode(answer)[0]}
        for leg, params in legs.items():
            for key in ("remote_tp_size", "transfer_id"):
                mine, theirs = (json.dumps(each.get(key)).replace("tx-" + "0" * 31, "tx-") for each in (params, world.legs[n, leg]))
                assert mine == theirs, (leg, n, key)
