"""From a scenario to a trial. What the harness can't do is refused by name, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults import Injector
from kvcover.real_backend.driver.processes import HOST, MOST_RANKS
from kvcover.real_backend.driver.trial import ROLES, Limits, RouterLegs, Trial
from kvcover.real_backend.inside.cells import TAG_BYTES, numbering_of
from kvcover.sim.errors import TierError
from kvcover.sim.scenario.dispatch import Dispatch, values_of
from kvcover.sim.scenario.endpoint import Request
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import Setup, resolve

# Fields of a scenario that the harness acts on, by place; `seed` decides nothing where nothing is drawn.
_KNOWN: dict[str, tuple[str, ...]] = {
    "": ("schema", "release", "decode_release", "mode", "model", "kv_dtype", "block_size", "prompt_tokens", "generate_ns",
         "router", "seed", "prefill", "decode", "timers", "requests", "faults", "expect", "fabric"),
    "prefill": ("tp", "dp", "num_blocks", "layout", "order", "block_size", "kv_dtype", "hybrid_kv", "lookahead_tokens",
                "max_tokens_per_step"),
    "decode": ("tp", "dp", "num_blocks", "layout", "order", "block_size", "kv_dtype", "hybrid_kv", "lookahead_tokens",
               "load_failure"),
    "timers": ("transfer_timeout_s", "defer_timeout_s", "recv_abort_timeout_s"),
    "requests": ("arrival_ns", "plain", "prompt_tokens", "generate_ns", "external_zero", "decode_hit_blocks", "prefill_dp",
                 "decode_dp", "prefill_blocks", "decode_blocks"),
}  # fmt: skip
_HINT = "leave it out, or use --tier model"
_RANK_MB = 90


def to_trial(scenario: Scenario) -> Trial:
    """Look up every name and let the router write its legs; raises TierError naming the first field that can't be done here.

    That its faults can be injected is for the tier to see to, see `Tier.refuse_undeclared`.
    """
    _refuse_unknown(scenario)
    setup = resolve(scenario)
    keys = Injector(setup.faults)
    _check_engines(setup)
    legs = tuple(_legs(setup, keys, request) for request in setup.requests)
    trial = Trial(setup, Limits.of(setup), legs, keys)
    _check_size(trial)
    return trial


def _refuse_unknown(scenario: Scenario) -> None:
    """Defaults are left out of what a scenario writes, so every field that is there was asked for."""
    fields: dict[str, Any] = msgspec.to_builtins(scenario)
    if fields.get("fabric", "loopback") != "loopback":
        raise TierError(
            "fabric", f"{fields['fabric']!r}: bytes move in memory on the connector tier", 'leave it out, or use "loopback"'
        )
    requests = fields.get("requests")
    parts: list[tuple[str, str, Mapping[str, Any]]] = [("", "", fields)]
    parts += [(name, f"{name}.", fields[name]) for name in ("prefill", "decode", "timers") if name in fields]
    if isinstance(requests, (list, tuple)):
        parts += [("requests", f"requests[{index}].", spec) for index, spec in enumerate(requests)]
    for part, prefix, given in parts:
        for name, value in given.items():
            if name not in _KNOWN[part]:
                text = f"{value!r}"
                shown = text if len(text) <= 60 else text[:57] + "..."
                raise TierError(f"{prefix}{name}", f"{shown} can't be done on the connector tier", _HINT)


def refuse_unlike_layers(trial: Trial) -> None:
    """Raise TierError for a model that only the connector tier can run."""
    if not trial.alike:
        raise TierError("model", "layers that are not all alike can't be run on the hardware tier", "use --tier connector")


def _check_engines(setup: Setup) -> None:
    if any(kind.mla and kind.head_dim < 2 for kind in setup.geometry.kinds):
        raise TierError("model", "a latent of one value can't be run", "use mla=64+16")
    unlike = setup.prefill.shape.kv_dtype != setup.decode.shape.kv_dtype
    for role, endpoint in zip(ROLES, (setup.prefill, setup.decode), strict=True):
        if (ranks := endpoint.tp * endpoint.dp) > MOST_RANKS:
            raise TierError(role, f"{ranks} ranks are more than the connector tier runs", f"use at most {MOST_RANKS}")
        shape = endpoint.shape
        if unlike and shape.head_bytes % TAG_BYTES:
            raise TierError(f"{role}.kv_dtype", f"{shape.kv_dtype}: a head of {shape.head_bytes} bytes holds no whole 4-byte tags",
                            "use a head_dim that is a multiple of 4")  # fmt: skip


def _legs(setup: Setup, keys: Injector, request: Request) -> RouterLegs:
    if request.rejected:
        asked = f"{setup.router.name} sends it to DP rank {request.prefill_dp}, which decode lacks"
        raise TierError(f"requests[{request.index}]", asked, "set its decode_dp: the connector tier has no front end to reject it")
    values = values_of(setup, request, f"tx-{request.index:032x}") | {"prefill.hosts": [HOST], "decode.hosts": [HOST]}
    now_ms = request.arrival_ns / 1e6
    dispatch = Dispatch(setup.router, setup.scenario.mode, values, keys, request.index, request.plain, now_ms)
    return RouterLegs(*dispatch.prefill_leg(), dispatch.decode_leg, dispatch.ports_off())


def _check_size(trial: Trial) -> None:
    requests, numbering = len(trial.setup.requests), numbering_of(trial)
    if not numbering.fits(requests):
        tags = (requests + 1) * numbering.a_request
        raise TierError("model", f"{tags} tagged values are more than fit 31 bits", "use fewer layers, requests or tokens")
    need, free = _cache_mb(trial), free_mb()
    if need > 0.7 * free:
        raise TierError("model", f"needs {need} MB of memory, {free} MB are free", "use fewer layers, ranks or tokens")


def memory_mb(trial: Trial) -> int:
    """What all processes of a run touch, about."""
    return _cache_mb(trial) + _RANK_MB * (trial.ranks + trial.setup.prefill.dp + trial.setup.decode.dp)


def _cache_mb(trial: Trial) -> int:
    """Memory of the cells that requests touch, twice where decode keeps what it used."""
    total = 0
    for role in ROLES:
        endpoint = trial.endpoint(role)
        blocks = sum(count for request in trial.setup.requests for _, count in endpoint.rows(request.prompt_tokens))
        groups = [(len(group.layers) * group.geometry.head_dim, group.shape) for group in endpoint.groups]
        values = sum(width * shape.planes * shape.heads for width, shape in groups)
        copies = 2 if role == "decode" and trial.setup.scenario.mode == "read" else 1
        total += copies * endpoint.tp * values * endpoint.shape.block_size * TAG_BYTES * blocks
    return round(total / 1e6)


def free_mb() -> int:
    """Memory that is free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000
