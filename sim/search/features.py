"""What a seed may switch on in a scenario: features, each of which draws options of its own into a draft.

What they draw is plain scenario data. They draw in the order of the table, so one may look at what those above it have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvcover.sim.cache.geometry import AXES
from kvcover.sim.cache.presets import DTYPE_BYTES
from kvcover.sim.errors import InputError
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import NEWEST, RELEASES, get_release
from kvcover.sim.scenario.fabric import FABRICS
from kvcover.sim.scenario.routers import ROUTERS, TOY_PROXY
from kvcover.sim.search.grid import (
    EVENT_FAULT_KINDS,
    event_fault_texts,
    key_fault_bodies,
    legs_of,
    request_count,
    side_of,
    sizes_of,
)
from kvcover.sim.search.shrink import Draft

Item = TypeVar("Item")
Rng = np.random.Generator


class Feature(msgspec.Struct, frozen=True):
    """Something that a seed may switch on: `draw` writes it into the draft. `full`: only with `--full`."""

    draw: Callable[[Rng, Draft], None]
    chance: float = 0.5
    full: bool = False


def pick(rng: Rng, items: Sequence[Item]) -> Item:
    """One of them, all equally likely."""
    return items[int(rng.random() * len(items))]


def _specs(draft: Draft) -> list[Draft]:
    """The draft's requests as a list, one each."""
    requests = draft.get("requests")
    if not isinstance(requests, list):
        requests = draft["requests"] = [{} for _ in range(requests or max(sizes_of(draft, "dp")))]
    return requests


def _blocks(draft: Mapping[str, Any], spec: Mapping[str, Any], side: str) -> int:
    tokens = spec.get("prompt_tokens") or draft["prompt_tokens"]
    tokens += draft.get(side, {}).get("lookahead_tokens", 0)
    return -(-int(tokens) // int(draft.get("block_size", 16)))


def _draw_release(rng: Rng, draft: Draft) -> None:
    draft["release"] = pick(rng, tuple(RELEASES))


def _draw_skew(rng: Rng, draft: Draft) -> None:
    draft["decode_release"] = pick(rng, tuple(RELEASES))


def _draw_read(_rng: Rng, draft: Draft) -> None:
    draft["mode"] = "read"


def _draw_tp(rng: Rng, draft: Draft) -> None:
    tp = pick(rng, (2, 4, 8))
    side_of(draft, "prefill")["tp"] = tp
    side_of(draft, "decode")["tp"] = tp if rng.random() < 0.5 else pick(rng, (1, 2, 3, 4, 8))


def _draw_large_tp(rng: Rng, draft: Draft) -> None:
    side_of(draft, pick(rng, ("prefill", "decode")))["tp"] = pick(rng, (3, 6, 16, 32))


def _draw_dp(rng: Rng, draft: Draft) -> None:
    for name in ("prefill", "decode"):
        side_of(draft, name)["dp"] = pick(rng, (1, 2, 3))


def _draw_pods(rng: Rng, draft: Draft) -> None:
    for name, dp in zip(("prefill", "decode"), sizes_of(draft, "dp"), strict=True):
        side_of(draft, name)["pods"] = pick(rng, [pods for pods in (1, 2, 3) if dp % pods == 0])


def _draw_engine(rng: Rng, draft: Draft) -> None:
    """What engines differ in besides their sizes; each is drawn alone, so that most seeds have few of them."""
    for name in ("prefill", "decode"):
        side = side_of(draft, name)
        if rng.random() < 0.3:
            side["lookahead_tokens"] = pick(rng, (1, 4, 17))
        if rng.random() < 0.3:
            side["cuda_graphs"] = pick(rng, ("none", "piecewise", "full"))
        if rng.random() < 0.3:
            side["collectives"] = True
            side["executor_timeout_s"] = pick(rng, (1.0, 300.0))
    if rng.random() < 0.3:
        side_of(draft, "prefill")["max_tokens_per_step"] = pick(rng, (1, 16, 24))
    if rng.random() < 0.3:
        side_of(draft, "decode")["load_failure"] = pick(rng, ("fail", "recompute"))


def _draw_model(rng: Rng, draft: Draft) -> None:
    layers = pick(rng, (1, 2, 3))
    sizes = sizes_of(draft, "tp")
    heads = [n for n in (1, 2, 4, 6, 8, 12, 16) if all(n % tp == 0 or tp % n == 0 for tp in sizes)]
    if rng.random() < 0.4 or not heads:
        draft["model"] = f"layers={layers},mla={pick(rng, (1, 8, 80))}"
    else:
        draft["model"] = f"layers={layers},kv_heads={pick(rng, heads)},head_dim={pick(rng, (1, 8, 128))}"
    draft["kv_dtype"] = pick(rng, tuple(DTYPE_BYTES))


def _draw_router(rng: Rng, draft: Draft) -> None:
    draft["router"] = pick(rng, (TOY_PROXY, *(name for name, router in ROUTERS.items() if not router.read_elsewhere)))


def _draw_prompt(rng: Rng, draft: Draft) -> None:
    draft["block_size"] = size = pick(rng, (1, 16, 64))
    draft["prompt_tokens"] = size * pick(rng, (1, 2, 3, 8)) - pick(rng, (0, 0, size // 2))


def _draw_requests(rng: Rng, draft: Draft) -> None:
    draft["requests"] = pick(rng, (1, 2, 3, 4))
    dps = dict(zip(("prefill_dp", "decode_dp"), sizes_of(draft, "dp"), strict=True))
    for spec in _specs(draft):
        if rng.random() < 0.5:
            spec["arrival_ns"] = pick(rng, (50_000, 2_000_000, 500_000_000, 90_000_000_000))
        if rng.random() < 0.3:
            spec["prompt_tokens"] = pick(rng, (1, 16, 100))
        for name, size in dps.items():
            if size > 1 and rng.random() < 0.3:
                spec[name] = pick(rng, range(size))


def _draw_kinds(rng: Rng, draft: Draft) -> None:
    """Requests that need less than all of their prompt from prefill, or nothing."""
    for spec in _specs(draft):
        kind = pick(rng, ("usual", "plain", "hit", "suffix", "zero"))
        if kind == "plain":
            spec["plain"] = True
        elif kind in ("hit", "suffix"):
            spec["suffix_only"] = kind == "suffix"
            spec["decode_hit_blocks"] = pick(rng, range(1 + -(-(spec.get("prompt_tokens") or draft["prompt_tokens"]) // 64)))
        elif kind == "zero":
            spec["external_zero"] = True


def _draw_generate(rng: Rng, draft: Draft) -> None:
    """Requests that go on after their first token, and what comes for one that runs."""
    draft["generate_ns"] = pick(rng, (1_000_000, 1_000_000_000, 100_000_000_000))


def _draw_workload(rng: Rng, draft: Draft) -> None:
    """More requests than fit at once, so that blocks are used again."""
    draft["requests"] = pick(rng, (4, 8, 16))
    draft["workload"] = {"rate_per_s": pick(rng, (1.0, 100.0, 10_000.0))}
    if rng.random() < 0.5:
        draft["workload"]["concurrency"] = pick(rng, (1, 2, 4))


def _draw_block_ids(rng: Rng, draft: Draft) -> None:
    """Blocks of no order, as of a pool that has long been in use; no two requests share one."""
    specs = _specs(draft)
    for side in ("prefill", "decode"):
        need = [_blocks(draft, spec, side) for spec in specs]
        ids = (1 + rng.permutation(sum(need) + pick(rng, (0, 5)))).tolist()
        for spec, blocks in zip(specs, need, strict=True):
            spec[f"{side}_blocks"] = [ids.pop() for _ in range(blocks)]


def _draw_pools(rng: Rng, draft: Draft) -> None:
    """Both pools as large, or not: addresses that a peer computes with its own pool's size show only then."""
    requests = draft.get("requests")
    specs = requests if isinstance(requests, list) else [{}] * request_count(draft)
    need = 6 + max(sum(_blocks(draft, spec, side) for spec in specs) for side in ("prefill", "decode"))
    sizes = [need * pick(rng, (1, 2, 3)) for _ in range(2)]
    if rng.random() < 0.5:
        sizes[1] = sizes[0]
    for name, size in zip(("prefill", "decode"), sizes, strict=True):
        side_of(draft, name)["num_blocks"] = size


def _draw_fabric(rng: Rng, draft: Draft) -> None:
    draft["fabric"] = pick(rng, tuple(FABRICS))


def _draw_rdma(rng: Rng, draft: Draft) -> None:
    draft["rdma"] = {
        "queue_pairs": pick(rng, (1, 2, 8)),
        "sq_depth": pick(rng, (1, 16, 8192)),
        "sq_wait_s": pick(rng, (0.001, 5.0)),
    }


def _draw_timers(rng: Rng, draft: Draft) -> None:
    draft["timers"] = {
        "transfer_timeout_s": pick(rng, (1.0, 5.0, 90.0)),
        "defer_timeout_s": pick(rng, (5.0, 30.0, 480.0)),
        "recv_abort_timeout_s": pick(rng, (10.0, 120.0)),
    }


def _draw_timing(rng: Rng, draft: Draft) -> None:
    draft["timing"] = {
        "message_ns": pick(rng, (1_000, 50_000, 5_000_000)),
        "handshake_ns": pick(rng, (0, 2_000_000, 50_000_000)),
        "prefill_layer_ns": pick(rng, (1_000, 2_000_000)),
        "decode_layer_ns": pick(rng, (1_000, 100_000)),
    }


def _draw_overrides(rng: Rng, draft: Draft) -> None:
    field = pick(rng, tuple(FIELDS))
    overrides = {field: pick(rng, tuple(FIELDS[field].policies))}
    try:
        for name in (draft["release"], draft.get("decode_release", NEWEST)):
            get_release(name).overridden(overrides)
    except InputError:
        return  # makes no sense with the rest of the release
    draft["overrides"] = overrides


def _draw_keys(rng: Rng, draft: Draft) -> None:
    """One key fault or two, of keys that the router's legs have; on a leg or both, for a request or all."""
    legs = legs_of(draft)
    faults = []
    for _ in range(pick(rng, (1, 1, 1, 2))):
        leg = pick(rng, tuple(legs))
        numbers = [key for key, value in legs[leg].items() if type(value) is int]  # sizes and ranks: half of the faults
        key = pick(rng, numbers if numbers and rng.random() < 0.5 else tuple(legs[leg]))
        bodies, count = key_fault_bodies(key, legs[leg][key]), request_count(draft)
        kind = pick(rng, ("drop", "drop", "set", "rename", "swap", *(["stale"] if count > 1 else [])))
        where = "" if rng.random() < 0.3 else f"@{leg}"
        only = f"#{pick(rng, range(count))}{pick(rng, ('', '+'))}" if count > 1 and rng.random() < 0.3 else ""
        faults.append(pick(rng, [body for body in bodies if body.startswith(kind)]) + where + only)
    draft["faults"] = [*draft.get("faults", ()), *faults]


def _draw_events(rng: Rng, draft: Draft) -> None:
    """One event fault or two, aimed at something that is there."""
    faults = []
    for _ in range(pick(rng, (1, 1, 1, 2))):
        kind = pick(rng, EVENT_FAULT_KINDS)
        faults.append(pick(rng, event_fault_texts(kind, draft)))
    draft["faults"] = [*draft.get("faults", ()), *faults]


def _draw_layouts(rng: Rng, draft: Draft) -> None:
    """Both sides' caches in an order other than the usual; a latent has only one that a release takes."""
    if "mla" in draft.get("model", ""):
        return
    layout, order = pick(rng, _layouts(draft))
    for name in ("prefill", "decode"):
        side_of(draft, name).update(layout=layout, order=order)


def _layouts(draft: Draft) -> list[tuple[str, str]]:
    """Layouts and orders of K and V that both releases take."""
    releases = [get_release(draft.get(name) or draft["release"]) for name in ("release", "decode_release")]
    known = [(layout, order) for layout, order in AXES if layout != "latent"]
    return [pair for pair in known if all(release.call("cache_layouts")(pair[0], False) for release in releases)]


def _draw_unlike(rng: Rng, draft: Draft) -> None:
    """One side's caches differ from the other's, in their order, their dtype or the size of a block."""
    side = side_of(draft, pick(rng, ("prefill", "decode")))
    what, size = pick(rng, ("layout", "kv_dtype", "block_size")), draft.get("block_size", 16)
    if what == "layout" and "mla" not in draft.get("model", ""):
        side["layout"], side["order"] = pick(rng, _layouts(draft))
    elif what == "kv_dtype":
        side["kv_dtype"] = pick(rng, tuple(DTYPE_BYTES))
    elif what == "block_size":
        requests = draft.get("requests")
        specs = requests if isinstance(requests, list) else []
        larger = size * pick(rng, (2, 4))
        tokens = [draft["prompt_tokens"], *(spec.get("prompt_tokens", larger) for spec in specs)]
        # Blocks that were drawn by number are as many as the usual size wants.
        if not any("prefill_blocks" in spec for spec in specs) and all(count % larger == 0 for count in tokens):
            side["block_size"] = larger


# To add a feature, add a line. They draw in this order, so one may look at what those above it have drawn.
FEATURES: dict[str, Feature] = {
    "release": Feature(_draw_release, chance=0.9),
    "skew": Feature(_draw_skew, chance=0.1),
    "read": Feature(_draw_read),
    "tp": Feature(_draw_tp),
    "large-tp": Feature(_draw_large_tp, chance=0.2, full=True),
    "dp": Feature(_draw_dp),
    "pods": Feature(_draw_pods, chance=0.1),
    "engine": Feature(_draw_engine, chance=0.3),
    "model": Feature(_draw_model),
    "router": Feature(_draw_router, chance=0.3),
    "prompt": Feature(_draw_prompt),
    "requests": Feature(_draw_requests),
    "kinds": Feature(_draw_kinds, chance=0.15),
    "generate": Feature(_draw_generate, chance=0.3),
    "workload": Feature(_draw_workload, chance=0.15),
    "block-ids": Feature(_draw_block_ids, chance=0.2),
    "pools": Feature(_draw_pools, chance=0.3),
    "fabric": Feature(_draw_fabric),
    "rdma": Feature(_draw_rdma, chance=0.2),
    "timers": Feature(_draw_timers, chance=0.3),
    "timing": Feature(_draw_timing, chance=0.3),
    "overrides": Feature(_draw_overrides, chance=0.3, full=True),
    "keys": Feature(_draw_keys),
    "events": Feature(_draw_events, chance=0.25),
    "layouts": Feature(_draw_layouts, chance=0.2),
    "unlike": Feature(_draw_unlike, chance=0.15),
}
# What `--no-faults` leaves out: a router that sends wrong sizes, pods of which no router tells, a send queue that is too
# small and caches that do not fit each other are faults like any other.
FAULTY = ("pods", "router", "rdma", "keys", "events", "unlike")
