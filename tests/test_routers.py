"""Router legs against what the real programs sent (`data/router_legs.toml`)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sim.routers import ROUTERS, get_router

LEGS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "data" / "router_legs.toml").read_text())["leg"]
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
    assert set(ROUTERS) - recorded == {"wide-ep"}, "only this one is put together from what the connector reads"
