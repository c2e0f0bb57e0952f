"""From a scenario to a connector case. What the harness can't do is refused by name, before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvcover.faults import KINDS, EventFault, Injector
from kvcover.real_backend.driver.case import CacheForm, ConnectorCase, EngineSize, FaultPlan, ModelShape, RequestCase, Side, Timers
from kvcover.real_backend.driver.processes import MOST_RANKS
from kvcover.real_backend.driver.rank_faults import RANK_KINDS
from kvcover.real_backend.inside.injection import NOTICE_KINDS, TRANSFER_KINDS
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.errors import TierError
from kvcover.sim.moriio.transfer import BlockPool
from kvcover.sim.scenario.dispatch import Dispatch
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.scenario import Timers as ScenarioTimers
from kvcover.sim.scenario.setup import Endpoint, Request, Setup, resolve

# Fields of a scenario that the harness acts on, by place; `seed` decides nothing where nothing is drawn.
_KNOWN: dict[str, tuple[str, ...]] = {
    "": ("schema", "release", "decode_release", "mode", "model", "kv_dtype", "block_size", "prompt_tokens", "generate_ns",
         "router", "seed", "prefill", "decode", "timers", "requests", "faults", "expect", "fabric"),
    "prefill": ("tp", "dp", "num_blocks", "layout", "order", "block_size", "kv_dtype", "hybrid_kv"),
    "decode": ("tp", "dp", "num_blocks", "layout", "order", "block_size", "kv_dtype", "hybrid_kv", "lookahead_tokens"),
    "timers": ("transfer_timeout_s", "defer_timeout_s", "recv_abort_timeout_s"),
    "requests": ("arrival_ns", "prompt_tokens", "generate_ns", "external_zero", "prefill_dp", "decode_dp", "prefill_blocks",
                 "decode_blocks"),
}  # fmt: skip
_HINT = "leave it out, or use --tier model"
_EVENTS = (*NOTICE_KINDS, *TRANSFER_KINDS, *RANK_KINDS, "abort", "stop-at-prefill", "fail-leg", "delay-leg", "stale-registration")
_RANK_MB = 90
_MOST_TAGS = 2**31


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario, ready to run. `keys` counts the faults of the router's keys and of what it knows, which act on the legs."""

    scenario: Scenario
    setup: Setup
    case: ConnectorCase
    keys: Injector

    @property
    def memory_mb(self) -> int:
        """What all its processes touch, about."""
        return _cache_mb(self.case) + _RANK_MB * (self.case.ranks + self.case.prefill.dp + self.case.decode.dp)


def to_job(scenario: Scenario) -> Job:
    """Translate, or raise TierError naming the first field that the connector tier can't do."""
    _refuse_unknown(scenario)
    setup = resolve(scenario)
    keys = Injector(setup.faults)
    for index, fault in enumerate(setup.faults):
        if isinstance(fault, EventFault) and fault.kind not in _EVENTS:
            where = "on the model tier only" if "connector" not in KINDS[fault.kind].tiers else "not on the connector tier yet"
            raise TierError(f"faults[{index}]", f"{fault.kind} acts {where}", _HINT)
    tokens = max(request.prompt_tokens for request in setup.requests)
    case = ConnectorCase(
        mode=scenario.mode,
        model=_shape(setup.geometry),
        prefill=_size("prefill", setup),
        decode=_size("decode", setup),
        requests=_requests(setup, keys),
        prompt_tokens=tokens,
        timers=_timers(scenario.timers),
        plan=FaultPlan(setup.faults),
    )
    _check_size(case)
    return Job(scenario, setup, case, keys)


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


def refuse_unlike_layers(job: Job) -> None:
    """Raise TierError for a model that only the connector tier can run."""
    if not job.case.model.alike:
        raise TierError("model", "layers that are not all alike can't be run on the hardware tier", "use --tier connector")


def _shape(geometry: Geometry) -> ModelShape:
    main = _kind(geometry)
    if geometry.minor is None:
        return main
    every = geometry.minor_layers[0] + 1
    if geometry.minor_layers != tuple(range(every - 1, geometry.layers, every)):
        raise TierError("model", "layers of another kind in no regular order can't be run", _HINT)
    return replace(main, minor=_kind(geometry.minor), minor_layers=geometry.minor_layers)


def _kind(geometry: Geometry) -> ModelShape:
    if not geometry.mla:
        return ModelShape(geometry.layers, geometry.kv_heads, geometry.head_dim, window=geometry.window, state=geometry.state)
    width = geometry.head_dim
    if width < 2:
        raise TierError("model", "a latent of one value can't be run", "use mla=64+16")
    rope = 64 if width > 320 else max(1, width // 5)
    return ModelShape(geometry.layers, latent=width - rope, rope=rope)


def _size(side: Side, setup: Setup) -> EngineSize:
    endpoint = setup.prefill if side == "prefill" else setup.decode
    if endpoint.tp * endpoint.dp > MOST_RANKS:
        raise TierError(
            side, f"{endpoint.tp * endpoint.dp} ranks are more than the connector tier runs", f"use at most {MOST_RANKS}"
        )
    size, lookahead = endpoint.shape.block_size, endpoint.side.lookahead_tokens
    if lookahead > size or (lookahead and setup.scenario.mode == "write"):
        raise TierError(f"{side}.lookahead_tokens", f"{lookahead}: the harness has one block of them, in READ", _HINT)
    hybrid = endpoint.side.hybrid_kv and (setup.geometry.has_states or endpoint.release.hybrid_manager == "on")
    return EngineSize(endpoint.tp, endpoint.dp, endpoint.shape.num_blocks, _form(side, endpoint, setup), hybrid, lookahead)


def _form(side: Side, endpoint: Endpoint, setup: Setup) -> CacheForm:
    """How the caches lie. Of equal dtypes nothing depends, and cells are tagged in 4 bytes: only unequal ones are told."""
    shape = endpoint.shape
    if setup.prefill.shape.kv_dtype == setup.decode.shape.kv_dtype:
        return CacheForm(shape.block_size, endpoint.side.layout, endpoint.side.order)
    if shape.head_bytes % 4:
        raise TierError(f"{side}.kv_dtype", f"{shape.kv_dtype}: a head of {shape.head_bytes} bytes holds no whole 4-byte tags",
                        "use a head_dim that is a multiple of 4")  # fmt: skip
    return CacheForm(shape.block_size, endpoint.side.layout, endpoint.side.order, shape.kv_dtype)


def _timers(given: ScenarioTimers) -> Timers:
    """Timers that the scenario sets are kept; vLLM's defaults are too long to wait for, so the harness has its own."""
    usual = ScenarioTimers()
    own = Timers()
    return Timers(
        transfer_s=given.transfer_timeout_s if given.transfer_timeout_s != usual.transfer_timeout_s else None,
        defer_s=given.defer_timeout_s if given.defer_timeout_s != usual.defer_timeout_s else None,
        read_abort_s=given.recv_abort_timeout_s if given.recv_abort_timeout_s != usual.recv_abort_timeout_s else own.read_abort_s,
    )


def _requests(setup: Setup, keys: Injector) -> tuple[RequestCase, ...]:
    pools: dict[tuple[Side, int], BlockPool] = {}
    for side, endpoint in (("prefill", setup.prefill), ("decode", setup.decode)):
        for dp in range(endpoint.dp):
            fixed = {
                block
                for request in setup.requests
                if (request.prefill_dp if side == "prefill" else request.decode_dp) == dp
                for block in getattr(request, f"{side}_blocks") or ()
            }
            pools["prefill" if side == "prefill" else "decode", dp] = BlockPool(endpoint.shape.num_blocks, fixed)

    def blocks(side: Side, dp: int, request: Request) -> tuple[int, ...]:
        fixed = request.prefill_blocks if side == "prefill" else request.decode_blocks
        endpoint = setup.prefill if side == "prefill" else setup.decode
        count = sum(blocks - skipped for skipped, blocks in endpoint.rows(request.prompt_tokens))
        if not pools[side, dp].fits(count, fixed):
            raise TierError(f"{side}.num_blocks", "too few for all requests at once", "raise it: the connector tier never queues")
        tables = pools[side, dp].take_tables(request, endpoint, fixed)
        return tuple(int(block) for table in tables for block in table)

    return tuple(
        _request(setup, keys, request, blocks("prefill", request.prefill_dp, request), blocks("decode", request.decode_dp, request))
        for request in setup.requests
    )


def _request(
    setup: Setup, keys: Injector, request: Request, at_prefill: tuple[int, ...], at_decode: tuple[int, ...]
) -> RequestCase:
    scenario = setup.scenario
    if request.rejected:
        asked = f"{setup.router.name} sends it to DP rank {request.prefill_dp}, which decode lacks"
        raise TierError(f"requests[{request.index}]", asked, "set its decode_dp: the connector tier has no front end to reject it")
    tokens = setup.decode.shape.block_size
    if request.prompt_tokens % tokens:
        problem = f"{request.prompt_tokens} tokens: no whole blocks of {tokens}"
        raise TierError(f"requests[{request.index}].prompt_tokens", problem, f"use {request.blocks * tokens}")
    values = {
        "transfer_id": f"tx-{request.index:032x}",
        "prefill.tp": setup.prefill.tp,
        "prefill.dp": setup.prefill.dp,
        "prefill.dp_rank": request.prefill_dp,
        "prefill.dp_local": setup.prefill.local_dp,
        "prefill.hosts": ["127.0.0.1"],
        "decode.tp": setup.decode.tp,
        "decode.dp": setup.decode.dp,
        "decode.dp_rank": request.decode_dp,
        "decode.dp_local": setup.decode.local_dp,
        "decode.hosts": ["127.0.0.1"],
    }

    now_ms = request.arrival_ns / 1e6
    dispatch = Dispatch(setup.router, scenario.mode, values, keys, request.index, now_ms=now_ms)
    return RequestCase(
        at_prefill,
        at_decode,
        dispatch.prefill_leg()[0],
        lambda response: dispatch.decode_leg(response)[0],
        request.prefill_dp,
        request.decode_dp,
        request.prompt_tokens,
        request.external_zero,
        request.generate_ns / 1e9,
        request.arrival_ns / 1e9,
        dispatch.ports_off(),
    )


def _check_size(case: ConnectorCase) -> None:
    model = case.model
    tags = (len(case.requests) + 1) * case.prompt_tokens * model.layers * math.prod(model.room)
    if tags >= _MOST_TAGS:
        raise TierError("model", f"{tags} tagged values are more than fit 31 bits", "use fewer layers, requests or tokens")
    need, free = _cache_mb(case), _free_mb()
    if need > 0.7 * free:
        raise TierError("model", f"needs {need} MB of memory, {free} MB are free", "use fewer layers, ranks or tokens")


def _cache_mb(case: ConnectorCase) -> int:
    """Memory of the cells that requests touch, twice where decode keeps what it used."""
    model, total = case.model, 0
    for side in ("prefill", "decode"):
        size = case.prefill if side == "prefill" else case.decode
        kinds = [model.at(layer) for layer in range(model.layers)]
        values = sum(kind.planes * len(kind.owned_heads(0, size.tp)) * kind.width for kind in kinds)
        a_block = values * size.cache.block_size * 4
        copies = 2 if side == "decode" and case.mode == "read" else 1
        total += copies * size.tp * a_block * sum(len(request.prefill_blocks) for request in case.requests)
    return round(total / 1e6)


def _free_mb() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000


free_mb = _free_mb
