"""Router legs against what the real programs sent (`data/router_legs.toml`)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.sim.scenario.routers import ROUTERS, get_router

LEGS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parents[1] / "data" / "router_legs.toml").read_text())["leg"]
PLAIN = [leg for leg in LEGS if "options" not in leg]


def name_of(leg: dict[str, Any]) -> str:
    size = f"p{leg['prefill']['tp']}x{leg['prefill']['dp']}-d{leg['decode']['tp']}x{leg['decode']['dp']}"
    return f"{leg['router']}-{leg['mode']}-{leg['side']}-{size}-{'-'.join(leg.get('engine_releases', ['any']))}"


@pytest.mark.parametrize("leg", PLAIN, ids=[name_of(leg) for leg in PLAIN])
def test_leg_is_what_the_real_router_sent(leg: dict[str, Any]) -> None:
    recorded = json.loads(leg["params"])
    router = ROUTERS.get(leg["router"]) or get_router("toy-proxy", leg["releases"][0])
    response = json.loads(leg["prefill_reply"]) if "prefill_reply" in leg else None
    other = {"prefill": "decode", "decode": "prefill"}[leg["side"]]
    values = {
        "transfer_id": "<transfer_id>",
        **{f"{side}.{size}": leg[side][size] for side in ("prefill", "decode") for size in ("tp", "dp")},
        # which rank a router picks is its own affair: taken from the record
        f"{other}.dp_rank": recorded.get("remote_dp_rank", 0),
        f"{leg['side']}.dp_rank": 0,
    }
    if leg["side"] == "prefill":
        built = router.prefill_leg(leg["mode"], values)
    else:
        built = router.decode_leg(leg["mode"], values, response)
    assert built == recorded


def test_every_router_was_recorded() -> None:
    recorded = {leg["router"] for leg in LEGS}
    others = {name for name, router in ROUTERS.items() if router.read_elsewhere}
    assert others == {"ray-serve #63951", "ray-serve later", "llm-d-router"}
    assert set(ROUTERS) - recorded - others == {"wide-ep"}, "only this one is put together from what the connector reads"
    assert [name for name, router in ROUTERS.items() if router.recorded] == sorted(recorded)


def test_which_routers_send_decode_to_prefills_dp_rank() -> None:
    """Only decode's DP size 1 tells a rank that was taken over from one that the router chose."""
    pinned: dict[str, bool] = {}
    for leg in PLAIN:
        if leg["side"] == "decode" and leg["prefill"]["dp"] == 2 and leg["decode"]["dp"] == 1:
            pinned[leg["router"]] = "x-data-parallel-rank" in leg["headers"]
    assert pinned == {name: router.decode_follows for name, router in ROUTERS.items() if router.recorded}


@pytest.mark.parametrize(
    ("router", "release", "outcome"),
    [
        ("ray-serve #63951", "0.27.0", "corrupt"),  # a wrong key is worse than none: all ranks write to decode's rank 0
        ("ray-serve #63951", "0.24.0", "ok"),  # which has no map of ranks
        ("ray-serve later", "0.26.0", "ok"),  # the one release line that reads tp_size alone
        ("ray-serve later", "0.27.0", "ok"),
        ("llm-d-router", "0.33.0", "ok"),
    ],
)
def test_what_public_sources_say_of_others_leads_to(router: str, release: str, outcome: str) -> None:
    sizes = {"prefill": {"tp": 8}, "decode": {"tp": 8}, "model": "layers=2,mla=64+16"}
    assert run(build({"release": release, "router": router, **sizes})).outcome == outcome


def test_a_leg_without_a_transfer_id_needs_a_release_that_makes_one() -> None:
    """llm-d's sidecar sends none in READ (vllm#44355); 0.28.0 and newer make one up."""
    old, new = (run(build({"release": r, "router": "llm-d-router", "mode": "read"})) for r in ("0.27.0", "0.28.0"))
    assert (old.outcome, new.outcome) == ("crash", "ok")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_dp_rank_that_decode_lacks_is_rejected(mode: str) -> None:
    """N11: since 0.28.0 the toy proxy names prefill's DP rank on decode's leg, and vLLM checks the range."""
    sizes = {"mode": mode, "prefill": {"dp": 3}, "decode": {"dp": 2}, "requests": 3, "model": "layers=2,mla=64+16"}
    new, old = (run(build({"release": release, **sizes})) for release in ("0.28.0", "0.27.0"))
    assert [outcome == "failed" for outcome in new.by_request] == [False, False, True]
    assert [finding.text for finding in new.findings if finding.kind == "lost"] == [
        "the router lost request 2: decode has no DP rank 2, which the router asks for, and rejects the request"
    ]
    assert "failed" not in old.by_request, "up to 0.27.0 decode places it by itself"
    chosen = run(build({"release": "0.28.0", **sizes, "requests": [{}, {}, {"decode_dp": 0}]}))
    assert chosen.by_request[2] != "failed", "a scenario may place it otherwise"


def test_equal_dp_goes_to_equal_ranks() -> None:
    result = run(build({"release": "0.33.0", "prefill": {"dp": 4}, "decode": {"dp": 8}, "requests": 8}))
    assert {rank.dp for rank in result.by_rank if rank.coverage} == {0, 1, 2, 3}
