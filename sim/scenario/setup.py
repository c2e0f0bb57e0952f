"""A scenario with every name looked up and every default filled in: what a run starts from."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvcover.faults import KINDS, EventFault, Fault, KeyFault
from kvcover.sim.cache.geometry import Geometry
from kvcover.sim.cache.layers import Table, tables_of
from kvcover.sim.cache.presets import resolve_model
from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.kernel.clock import stream
from kvcover.sim.releases.records import ConnectorRelease, get_release
from kvcover.sim.scenario.endpoint import Endpoint, Request, blocks_of, check_whole_blocks, endpoint_of, has_hybrid_kv, table_rows
from kvcover.sim.scenario.fabric import Fabric, get_fabric
from kvcover.sim.scenario.routers import Router, get_router
from kvcover.sim.scenario.scenario import RequestSpec, Scenario, check_fault_count, checked, fault_of

Watch = Callable[[str, ConnectorRelease], ConnectorRelease]
_MAX_EVENTS = 20_000_000  # minutes, and 3 GB
_MAX_NEEDED = 1 << 27  # cells of all requests on all ranks: 3 GB
_MAX_CELLS = 1 << 24  # of one rank and layer


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario with every name looked up."""

    scenario: Scenario
    geometry: Geometry
    router: Router
    fabric: Fabric
    faults: tuple[Fault, ...]
    requests: tuple[Request, ...]
    prefill: Endpoint
    decode: Endpoint
    transfer_timeout_ns: int
    defer_timeout_ns: int
    recv_abort_timeout_ns: int


def resolve(
    scenario: Scenario, geometry: Geometry | None = None, watch: Watch | None = None, router: Router | None = None
) -> Setup:
    """Look up every name of the scenario, whoever made it; raises InputError for fields, names and sizes that make no sense.

    `geometry` and `router` stand in for the scenario's model and router, `watch` for the release of each engine (prefill, decode).

    >>> resolve(Scenario(release="0.26.0", decode=Side(tp=8))).decode.rank_names()[-1]
    'D7'
    """
    scenario = checked(scenario)
    prefill_release = get_release(scenario.release).overridden(scenario.overrides)
    decode_release = get_release(_decode_release(scenario), "decode_release").overridden(scenario.overrides)
    if watch is not None:
        prefill_release, decode_release = watch("prefill", prefill_release), watch("decode", decode_release)
    geometry = resolve_model(scenario.model) if geometry is None else geometry
    router = router or get_router(scenario.router, prefill_release.name)
    router.legs(scenario.mode)
    tables = {
        "prefill": tables_of(geometry, has_hybrid_kv(scenario.prefill, prefill_release, geometry)),
        "decode": tables_of(geometry, has_hybrid_kv(scenario.decode, decode_release, geometry)),
    }
    requests = _requests(scenario, router, tables)
    prefill = endpoint_of("prefill", scenario, geometry, requests, prefill_release, tables["prefill"])
    decode = endpoint_of("decode", scenario, geometry, requests, decode_release, tables["decode"])
    _check_expect(scenario)
    _check_work(geometry, requests, prefill, decode)
    return Setup(
        scenario=scenario,
        geometry=geometry,
        router=router,
        fabric=get_fabric(scenario.fabric),
        faults=_faults(scenario, requests, prefill, decode),
        requests=requests,
        prefill=prefill,
        decode=decode,
        transfer_timeout_ns=round(scenario.timers.transfer_timeout_s * 1e9),
        defer_timeout_ns=round(scenario.timers.defer_timeout_s * 1e9),
        recv_abort_timeout_ns=round(scenario.timers.recv_abort_timeout_s * 1e9),
    )


def _decode_release(scenario: Scenario) -> str:
    return scenario.release if scenario.decode_release is None else scenario.decode_release


def _faults(scenario: Scenario, requests: tuple[Request, ...], prefill: Endpoint, decode: Endpoint) -> tuple[Fault, ...]:
    ranks = [*prefill.rank_names(), *decode.rank_names()]
    faults: list[Fault] = []
    check_fault_count(scenario)
    for index, given in enumerate(scenario.faults):
        place = f"faults[{index}]"
        fault = fault_of(place, given)
        if isinstance(fault, KeyFault):
            named = [*(fault.requests or ()), *([] if fault.since is None else [fault.since])]
        else:
            named = [fault.request] if fault.request is not None else []
            _check_target(place, fault, ranks, named)
            _check_former_ports(place, fault, prefill if fault.target == "prefill" else decode)
        for request in named:
            if request >= len(requests):
                raise InputError(place, f"there is no request {request}", f"use 0 to {len(requests) - 1}")
        faults.append(fault)
    return tuple(faults)


def _check_target(place: str, fault: EventFault, ranks: list[str], named: list[int]) -> None:
    """Ranks and requests that an event fault names must exist."""
    syntax = KINDS[fault.kind].syntax
    engines = {"P", "D", *(rank.partition(".")[0] for rank in ranks)}
    if ":RANK" in syntax and fault.target not in ranks:
        raise InputError(place, f"there is no rank {fault.target!r}", _near_rank(fault.target, ranks))
    for name in (fault.sender, fault.receiver):
        if name is not None and name not in ranks and name not in engines:
            raise InputError(place, f"there is no rank {name!r}", _near_rank(name, ranks))
    if ":REQUEST" in syntax:
        named.append(int(fault.target))


def _check_former_ports(place: str, fault: EventFault, endpoint: Endpoint) -> None:
    """Where an instance was registered before there must be ports."""
    if fault.kind != "stale-registration" or fault.port is None:
        return
    low, high = sorted((endpoint.handshake_port, endpoint.notify_port))
    last = 65536 - endpoint.tp * endpoint.dp - high
    if not 1 - low <= fault.port <= last:
        raise InputError(place, f"port={fault.port} leads out of the range of ports", f"use {1 - low} to {last}")


def _near_rank(name: str, ranks: list[str]) -> str:
    """The nearest rank, or all of them when they are few."""
    if len(ranks) <= 16:
        return nearest(name.upper(), ranks)
    prefill = [rank for rank in ranks if rank.startswith("P")]
    return f"use {prefill[0]} to {prefill[-1]} or {ranks[len(prefill)]} to {ranks[-1]}"


def _check_expect(scenario: Scenario) -> None:
    expected = scenario.expect.by_rank if scenario.expect else None
    there_are = scenario.decode.instances * scenario.decode.dp * scenario.decode.tp
    if expected is not None and len(expected) != there_are:
        raise InputError("expect.by_rank", f"{len(expected)} numbers for {there_are} decode ranks", f"give {there_are}")


def _check_work(geometry: Geometry, requests: tuple[Request, ...], prefill: Endpoint, decode: Endpoint) -> None:
    """Refuse what would run for hours or fill the memory, in steps of ranks and in cells, before it begins."""
    ranks = prefill.tp + decode.tp
    step = prefill.side.max_tokens_per_step
    steps = sum(-(-request.prompt_tokens // step) if step else 1 for request in requests)
    events = steps * geometry.layers * ranks + prefill.tp * prefill.all_dp * decode.all_dp
    if events > _MAX_EVENTS:
        smaller = "max_tokens_per_step gives many steps: raise it, or lower" if steps > len(requests) else "lower"
        raise InputError(
            "scenario",
            f"{len(requests)} requests × {geometry.layers} layers × TP {prefill.tp} + {decode.tp} are some {events} events, "
            f"more than the {_MAX_EVENTS} that end in minutes",
            f"{smaller} requests, the model's layers or tp",
        )
    a_block = sum(side.tp * g.shape.planes * g.shape.heads for side in (prefill, decode) for g in side.groups)
    cells = sum(request.blocks for request in requests) * a_block
    if cells > _MAX_NEEDED:
        problem = f"its requests have {cells} cells on all ranks, more than the {_MAX_NEEDED} that fit in memory"
        raise InputError("scenario", problem, "lower requests, prompt_tokens or tp")


def _requests(scenario: Scenario, router: Router, tables: dict[str, tuple[Table, ...]]) -> tuple[Request, ...]:
    wanted = scenario.requests
    if wanted is None:
        # One for each DP rank, so that a fault which only some DP ranks see is seen.
        wanted = max(side.dp * side.instances for side in (scenario.prefill, scenario.decode))
    specs = wanted if isinstance(wanted, tuple) else (RequestSpec(),) * wanted
    if not specs:
        raise InputError("requests", "[] holds no request", "leave it out, or give a number such as 1")
    arrivals = _arrivals(scenario, len(specs))
    return tuple(_request(scenario, router, index, spec, arrivals[index], tables) for index, spec in enumerate(specs))


def _arrivals(scenario: Scenario, count: int) -> list[int]:
    """Poisson arrivals of the workload in ns, or all at once."""
    rate = scenario.workload.rate_per_s
    if rate is None:
        return [0] * count
    gaps = stream(scenario.seed, "arrivals").exponential(1e9 / rate, count)
    arrivals: list[int] = gaps.cumsum().astype("int64").tolist()
    return arrivals


def _request(
    scenario: Scenario, router: Router, index: int, spec: RequestSpec, arrival_ns: int, tables: dict[str, tuple[Table, ...]]
) -> Request:
    place = f"requests[{index}]"
    tokens = spec.prompt_tokens or scenario.prompt_tokens
    blocks = blocks_of(tokens, scenario, "decode")
    check_whole_blocks(f"{place}.prompt_tokens" if spec.prompt_tokens else "prompt_tokens", tokens, scenario)
    for name, side in (("prefill", scenario.prefill), ("decode", scenario.decode)):
        instance, dp = getattr(spec, f"{name}_instance"), getattr(spec, f"{name}_dp")
        if instance is not None and instance >= side.instances:
            hint = f"use 0 to {side.instances - 1} or raise {name}.instances"
            raise InputError(f"{place}.{name}_instance", f"there is no instance {instance}", hint)
        if dp is not None and dp >= side.dp:
            raise InputError(f"{place}.{name}_dp", f"{dp} is no DP rank", f"use 0 to {side.dp - 1} or raise {name}.dp")
        ids = getattr(spec, f"{name}_blocks")
        if ids is None:
            continue
        rows = table_rows(name, tables[name], tokens, scenario)
        need = sum(count - skipped for skipped, count in rows)
        if len(ids) != need:
            raise InputError(f"{place}.{name}_blocks", f"{len(ids)} blocks for a prompt of {need}", f"give {need} block ids")
        if len(set(ids)) != len(ids):
            raise InputError(f"{place}.{name}_blocks", f"{short(list(ids))} repeats a block", "give each block once")
    if spec.decode_hit_blocks > blocks:
        raise InputError(f"{place}.decode_hit_blocks", f"{spec.decode_hit_blocks} of {blocks} blocks", f"use at most {blocks}")
    to_prefill, to_decode, rejected = _places(scenario, router, index, spec)
    return Request(
        index=index,
        arrival_ns=arrival_ns if spec.arrival_ns is None else spec.arrival_ns,
        prompt_tokens=tokens,
        blocks=blocks,
        prefill_size=blocks_of(tokens, scenario, "prefill"),
        plain=spec.plain,
        decode_hit_blocks=spec.decode_hit_blocks,
        suffix_only=spec.suffix_only,
        # In READ, and with recurrent states, decode computes the last prompt token itself: of a prompt of one it asks for nothing.
        external_zero=spec.external_zero or (tokens == 1 and (scenario.mode == "read" or any(t.state for t in tables["decode"]))),
        generate_ns=scenario.generate_ns if spec.generate_ns is None else spec.generate_ns,
        prefill_dp=to_prefill,
        decode_dp=to_decode,
        rejected=rejected,
        prefill_blocks=spec.prefill_blocks,
        decode_blocks=spec.decode_blocks,
    )


def _places(scenario: Scenario, router: Router, index: int, spec: RequestSpec) -> tuple[int, int, bool]:
    """Where a request goes: DP ranks of all instances of prefill and decode, and whether decode rejects it."""
    prefill, decode = scenario.prefill, scenario.decode
    p, d = router.choose(index, (prefill.instances, prefill.dp), (decode.instances, decode.dp))
    own = p.dp if spec.prefill_dp is None else spec.prefill_dp
    follows = router.decode_follows and prefill.dp > 1 and spec.decode_dp is None
    theirs = own if follows else d.dp if spec.decode_dp is None else spec.decode_dp
    to_prefill = (p.instance if spec.prefill_instance is None else spec.prefill_instance) * prefill.dp + own
    to_decode = (d.instance if spec.decode_instance is None else spec.decode_instance) * decode.dp + theirs % decode.dp
    return to_prefill, to_decode, follows and own >= decode.dp
