"""Shrinking: the answer finds the same, is 1-minimal, the same every time, and comes soon."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from kvcover import InputError
from kvcover.sim.search.shrink import find_once, reductions, shrink

COLLAPSE: dict[str, Any] = {
    "release": "0.26.0", "prefill": {"tp": 8}, "decode": {"tp": 8, "num_blocks": 400}, "model": "llama-3.1-70b",
    "prompt_tokens": 1000, "requests": [{"arrival_ns": 5}, {"prompt_tokens": 7}, {}], "fabric": "thor2", "seed": 77,
    "faults": ["drop:remote_dp_size#1", "set:remote_engine_id=\"x\"@prefill#2"], "timers": {"defer_timeout_s": 5.0},
}  # fmt: skip
ERASURE: dict[str, Any] = {
    "release": "0.30.0", "prefill": {"tp": 4}, "decode": {"tp": 4, "dp": 3}, "model": "layers=3,mla=64+16", "requests": 4,
    "faults": ["rename:remote_engine_id=x@decode", "drop:remote_tp_size@prefill"], "kv_dtype": "fp8", "seed": 5,
}  # fmt: skip


def test_rank_collapse_comes_out_as_a_person_would_write_it() -> None:
    small = shrink(COLLAPSE)
    assert small == {
        "release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}, "prompt_tokens": 1,
        "model": "layers=1,kv_heads=1,head_dim=1",
    }  # fmt: skip


def test_a_fault_that_matters_stays() -> None:
    draft = {"release": "0.27.0", "decode": {"dp": 2}, "model": "layers=3,mla=64+16", "prompt_tokens": 100,
             "faults": ["set:remote_engine_id=1@decode", "drop:remote_tp_size@prefill"]}  # fmt: skip
    assert shrink(draft) == {"release": "0.27.0", "decode": {"dp": 2}, "model": "layers=1,mla=1", "prompt_tokens": 1,
                             "faults": ["drop:remote_tp_size@prefill"]}  # fmt: skip


@pytest.mark.parametrize("draft", [COLLAPSE, ERASURE])
def test_no_single_reduction_keeps_the_finding(draft: dict[str, Any]) -> None:
    before = copy.deepcopy(draft)
    started = time.perf_counter()
    small = shrink(draft)
    assert time.perf_counter() - started < 10
    assert draft == before, "the draft that came in is not touched"
    assert find_once(small) == find_once(draft)
    assert [name for name, smaller in reductions(small) if find_once(smaller) == find_once(small)] == []
    assert shrink(draft) == small == shrink(small)


def test_shrinks_whatever_the_predicate_says() -> None:
    """A property of one's own, by counting: at least 3 layers and a TP size of at least 5 somewhere."""

    def same(draft: dict[str, Any]) -> bool:
        layers = int(draft["model"].split(",")[0].removeprefix("layers=")) if "=" in draft["model"] else 80
        return layers >= 3 and max(draft.get(side, {}).get("tp", 1) for side in ("prefill", "decode")) >= 5

    assert shrink({**COLLAPSE, "prefill": {"tp": 8, "dp": 4}}, same) == {
        "release": "0.26.0", "decode": {"tp": 5}, "model": "layers=3,kv_heads=1,head_dim=1", "prompt_tokens": 1,
    }  # fmt: skip


def test_requests_that_go_take_their_faults_along() -> None:
    draft = {"release": "0.27.0", "model": "layers=1,mla=1", "prompt_tokens": 1, "requests": [{}, {"arrival_ns": 9}, {}],
             "faults": ["drop:remote_engine_id@prefill#0", "drop:transfer_id@prefill#2"]}  # fmt: skip

    def same(smaller: dict[str, Any]) -> bool:
        return any("transfer_id" in fault for fault in smaller.get("faults", ())) and find_once(smaller) is not None

    assert shrink(draft, same)["faults"] == ["drop:transfer_id@prefill"]
    numbered = [smaller["faults"] for name, smaller in reductions(draft) if name == "requests" and len(smaller["requests"]) == 2]
    assert numbered[:2] == [["drop:transfer_id@prefill#1"], ["drop:remote_engine_id@prefill#0", "drop:transfer_id@prefill#1"]]


def test_nonsense_finds_nothing() -> None:
    assert find_once({"release": "0.1.0"}) is None
    assert find_once({"prefill": {"tp": -1}}) is None
    with pytest.raises(InputError):
        shrink({"release": "0.1.0"})
