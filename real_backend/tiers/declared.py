"""What the connector tier declares: the faults that it injects, the features that may be drawn for it, and what it pins."""

from __future__ import annotations

from typing import Any

from kvcover.faults.params import KEY_KINDS
from kvcover.real_backend.driver.rank_faults import RANK_KINDS
from kvcover.real_backend.inside.injection import NOTICE_KINDS, TRANSFER_KINDS

# Keys and registrations are spoilt as the router writes its legs; requests and legs by the driver, which plays the router.
INJECTED = frozenset(
    (
        *KEY_KINDS,
        *NOTICE_KINDS,
        *TRANSFER_KINDS,
        *RANK_KINDS,
        "stale-registration",
        "abort",
        "stop-at-prefill",
        "fail-leg",
        "delay-leg",
    )
)
# Swarm features that the harness can act on; what others draw would be refused.
DRAWN = ("read", "tp", "large-tp", "dp", "model", "router", "prompt", "requests", "generate", "block-ids", "pools", "keys",
         "events")  # fmt: skip
# Timers short enough to wait for, yet longer than a healthy handshake takes on a busy machine.
PINS: dict[str, Any] = {
    "fabric": "loopback",
    "timers": {"transfer_timeout_s": 2.5, "defer_timeout_s": 4.0, "recv_abort_timeout_s": 5.0},
}


_MOST_TP = 4
_LONGEST_NS = 6_000_000_000  # longer than the timers above, so that what they bring finds requests that run
_SIDES = ("prefill", "decode")


def fit(draft: dict[str, Any]) -> None:
    """All requests at once, of whole blocks; no single layer of split K and V; engines that start, and not too many ranks.

    TP and DP together on one side never start, as their ports collide: a seed that draws both keeps TP.
    """
    size = draft.get("block_size", 16)
    draft["prompt_tokens"] = _whole(draft["prompt_tokens"], size)
    if "kv_heads" in draft.get("model", ""):
        draft["model"] = draft["model"].replace("layers=1,", "layers=2,")
    for name in _SIDES:
        side = draft.get(name, {})
        if "tp" in side:
            side["tp"] = min(side["tp"], _MOST_TP)
        if side.get("tp", 1) > 1:
            side.pop("dp", None)
    if "generate_ns" in draft:
        draft["generate_ns"] = min(draft["generate_ns"], _LONGEST_NS)
    requests = draft.get("requests")
    for spec in requests if isinstance(requests, list) else ():
        spec.pop("arrival_ns", None)
        if "prompt_tokens" in spec:
            spec["prompt_tokens"] = _whole(spec["prompt_tokens"], size)


def _whole(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size
