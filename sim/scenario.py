"""The scenario: one strict, versioned description that every tier runs.

`load` reads TOML or JSON, `build` turns a plain dictionary into a `Scenario`, `Setup` is a scenario with every name
looked up and every default filled in. All of them raise InputError with the place, the value and the nearest right one.
"""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from faults import KINDS, EventFault, Fault, FaultSyntaxError, KeyFault, parse_fault
from sim.clock import stream
from sim.errors import InputError, PeerRefusal, nearest
from sim.fabric import Fabric, FabricSpec, get_fabric
from sim.geometry import CacheShape, Geometry
from sim.presets import resolve_model
from sim.releases import NEWEST, ConnectorRelease, get_release
from sim.routers import TOY_PROXY, Router, get_router

Mode = Literal["write", "read"]
Size = Annotated[int, Meta(ge=1, le=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Blocks = Annotated[int, Meta(ge=1, le=1 << 20)]
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15)]
Seconds = Annotated[float, Meta(gt=0, le=10**6)]
_MAX_CELLS = 1 << 24


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are errors; defaults are left out when written."""


class Side(_Strict, frozen=True):
    """One engine: `tp` ranks for each of `dp` data-parallel ranks; `num_blocks` a rank's KV pool.

    `pods` hosts share the DP ranks evenly. `max_tokens_per_step` splits prompts into chunks (prefill). `lookahead_tokens`
    are allocated beyond the prompt (speculative decoding). With `collectives` a TP rank that stalls in a layer stalls the
    others; the executor kills an engine whose step takes longer than `executor_timeout_s`.
    """

    tp: Size = 1
    dp: Size = 1
    pods: Size = 1
    host: str | None = None
    handshake_port: Port | None = None
    notify_port: Port | None = None
    num_blocks: Blocks | None = None
    max_tokens_per_step: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    lookahead_tokens: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    cuda_graphs: Literal["none", "piecewise", "full"] = "none"
    collectives: bool = False
    executor_timeout_s: Seconds | None = 300.0
    load_failure: Literal["fail", "recompute"] = "fail"


class Timers(_Strict, frozen=True):
    """The connector's own timers, in seconds (defaults: vLLM's)."""

    transfer_timeout_s: Seconds = 30.0
    defer_timeout_s: Seconds = 60.0
    recv_abort_timeout_s: Seconds = 120.0


class Timing(_Strict, frozen=True):
    """What takes how long, in ns of virtual time. Compute times are round numbers for an 8B model, not measurements."""

    message_ns: Nanoseconds = 50_000
    handshake_ns: Nanoseconds = 2_000_000
    prefill_layer_ns: Nanoseconds = 2_000_000
    decode_layer_ns: Nanoseconds = 100_000


class RequestSpec(_Strict, frozen=True):
    """One request; what is left out is filled in: ranks in turn, blocks from the pool.

    `plain` carries no `kv_transfer_params`. `decode_hit_blocks` of its blocks are in decode's prefix cache.
    `external_zero`: decode's scheduler asks for nothing from prefill, as for a request with `prompt_logprobs`.
    """

    arrival_ns: Nanoseconds | None = None
    plain: bool = False
    decode_hit_blocks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    external_zero: bool = False
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    prefill_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    decode_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    prefill_blocks: tuple[Annotated[int, Meta(ge=0, le=1 << 20)], ...] | None = None
    decode_blocks: tuple[Annotated[int, Meta(ge=0, le=1 << 20)], ...] | None = None


class Workload(_Strict, frozen=True):
    """When requests arrive: at `rate_per_s` on average (Poisson, from the seed), and at most `concurrency` at a time."""

    rate_per_s: Annotated[float, Meta(gt=0, le=10**6)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=4096)] | None = None


class Rdma(_Strict, frozen=True):
    """MoRI's queue pairs a transfer, depth of each send queue (work requests), and how long a post waits for room."""

    queue_pairs: Annotated[int, Meta(ge=1, le=64)] = 1
    sq_depth: Annotated[int, Meta(ge=1, le=1 << 20)] = 8192
    sq_wait_s: Seconds = 5.0


Outcome = Literal["ok", "refused", "recomputed", "failed", "degraded", "leak", "hang", "crash", "corrupt", "vacuous"]


class Expect(_Strict, frozen=True):
    """What `--check` compares the result with; without it, `--check` wants `ok`, `refused` or `recomputed`."""

    outcome: Outcome | None = None
    coverage: Annotated[float, Meta(ge=0, le=1)] | None = None
    by_rank: tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None = None


class Scenario(_Strict, frozen=True):
    """Everything that decides a run. The same scenario and seed give the same history on the model tier."""

    schema: Literal[1] = 1
    release: str = NEWEST
    decode_release: str | None = None
    mode: Mode = "write"
    model: str = "llama-3.1-8b"
    kv_dtype: Literal["fp8", "bf16", "fp16", "fp32"] = "bf16"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 256
    router: str = TOY_PROXY
    request_id_addresses: bool = True
    fabric: str | FabricSpec = "cx7"
    rdma: Rdma = Rdma()
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    prefill: Side = Side()
    decode: Side = Side()
    timers: Timers = Timers()
    timing: Timing = Timing()
    requests: Annotated[int, Meta(ge=1, le=4096)] | tuple[RequestSpec, ...] | None = None
    workload: Workload = Workload()
    faults: tuple[dict[str, Any] | str, ...] = ()
    overrides: dict[str, str] = {}
    expect: Expect | None = None


# -- reading -----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> dict[str, Any]:
    """The dictionary in a TOML or JSON file; `build` makes it a Scenario."""
    place = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(place, f"can't be read: {error.strerror or error}", "give the path of a scenario file") from None
    except UnicodeDecodeError:
        raise InputError(place, "is not UTF-8 text", "give a TOML or JSON file") from None
    try:
        data = json.loads(text) if place.endswith(".json") else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = "JSON" if place.endswith(".json") else "TOML"
        raise InputError(place, f"is not {kind}: {error}", "see `kvcover run --help` for an example") from None
    except RecursionError:
        raise InputError(place, "is nested too deeply", "see `kvcover run --help` for an example") from None
    if not isinstance(data, dict):
        raise InputError(place, "holds no table of fields", "see `kvcover run --help` for an example")
    return data


def build(data: Mapping[str, Any]) -> Scenario:
    """Convert and check; raises InputError naming the field, its value and the nearest right one."""
    _reject_unknown(Scenario, data, "")
    try:
        return msgspec.convert(data, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(error, data) from None


def set_field(data: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b.c` in nested dictionaries; list positions are numbers. Raises InputError when there is no such place."""
    *parents, last = path.split(".")
    here: Any = data
    for part in parents:
        if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict):
            here = here.setdefault(part, {})
        else:
            raise InputError(f"--set {path}", f"there is nothing at {part!r}", "name a field such as timers.defer_timeout_s")
    if isinstance(here, list) and last.isdecimal() and int(last) < len(here):
        here[int(last)] = value
    elif isinstance(here, dict) and last:
        here[last] = value
    else:
        raise InputError(f"--set {path}", f"there is nothing at {last!r}", "name a field such as timers.defer_timeout_s")


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct type in `X`, `X | None`, `tuple[X, ...]` or `Annotated[X, …]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    for inner in typing.get_args(annotation):
        found = _struct_in(inner)
        if found is not None:
            return found
    return None


def _reject_unknown(struct: type[msgspec.Struct], data: Any, place: str) -> None:
    if isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            _reject_unknown(struct, item, f"{place}[{index}]")
    if not isinstance(data, Mapping):
        return
    hints = typing.get_type_hints(struct, include_extras=True)
    for key, value in data.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in hints:
            raise InputError(where, f"no such field (its value is {_short(value)})", nearest(str(key), hints))
        inner = _struct_in(hints[key])
        if inner is not None:
            _reject_unknown(inner, value, where)


_AT = re.compile(r" - at `\$(.*)`$")


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any]) -> InputError:
    text = str(error)
    match = _AT.search(text)
    path = match.group(1).lstrip(".") if match else ""
    problem = text[: match.start()] if match else text
    value = _value_at(data, path)
    choices = _choices_at(path)
    if choices and isinstance(value, str):
        return InputError(path, f"{_short(value)} is not one of its values", nearest(value, choices))
    if choices and problem.startswith("Invalid enum value"):
        return InputError(path, f"{_short(value)} is not one of its values", "use " + " or ".join(choices))
    problem = problem[0].lower() + problem[1:].replace("`", "")
    return InputError(path or "scenario", f"{_short(value)} is wrong", problem)


def _value_at(data: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            data = data[int(part)] if isinstance(data, (list, tuple)) else data[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return data
    return data


def _choices_at(path: str) -> list[str]:
    """The values of the Literal at a path, as text."""
    annotation: Any = Scenario
    for part in re.findall(r"[^.\[\]]+", path):
        if part.isdecimal() or part == "...":
            continue
        struct = _struct_in(annotation)
        if struct is None:
            return []
        annotation = typing.get_type_hints(struct, include_extras=True).get(part)
    return _literals(annotation)


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [choice for inner in typing.get_args(annotation) for choice in _literals(inner)]
    return []


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- looking everything up ---------------------------------------------------------------------------------------


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with every default filled in; `shape` is the cache of one rank and layer."""

    letter: str
    tp: int
    dp: int
    hosts: tuple[str, ...]
    handshake_port: int
    notify_port: int
    shape: CacheShape
    release: ConnectorRelease
    side: Side

    @property
    def host(self) -> str:
        """The first pod's host, which is the instance's address."""
        return self.hosts[0]

    @property
    def local_dp(self) -> int:
        """DP ranks a pod."""
        return self.dp // len(self.hosts)

    def pod(self, dp: int) -> int:
        return dp // self.local_dp

    def rank_name(self, dp: int, tp: int) -> str:
        return f"{self.letter}{dp}.{tp}" if self.dp > 1 else f"{self.letter}{tp}"

    def rank_names(self) -> list[str]:
        return [self.rank_name(dp, tp) for dp in range(self.dp) for tp in range(self.tp)]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request with every default filled in; blocks are None when the pool chooses."""

    index: int
    arrival_ns: int
    prompt_tokens: int
    blocks: int
    plain: bool
    decode_hit_blocks: int
    external_zero: bool
    prefill_dp: int
    decode_dp: int
    prefill_blocks: tuple[int, ...] | None
    decode_blocks: tuple[int, ...] | None


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


def resolve(scenario: Scenario) -> Setup:
    """Look up every name of the scenario; raises InputError for names and numbers that don't fit together."""
    prefill_release = get_release(scenario.release)
    decode_release = get_release(scenario.decode_release or scenario.release, "decode_release")
    geometry = resolve_model(scenario.model, scenario.kv_dtype)
    requests = _requests(scenario)
    prefill = _endpoint("prefill", scenario, geometry, requests, prefill_release)
    decode = _endpoint("decode", scenario, geometry, requests, decode_release)
    return Setup(
        scenario=scenario,
        geometry=geometry,
        router=get_router(scenario.router, prefill_release.name),
        fabric=get_fabric(scenario.fabric),
        faults=_faults(scenario, requests, prefill, decode),
        requests=requests,
        prefill=prefill,
        decode=decode,
        transfer_timeout_ns=round(scenario.timers.transfer_timeout_s * 1e9),
        defer_timeout_ns=round(scenario.timers.defer_timeout_s * 1e9),
        recv_abort_timeout_ns=round(scenario.timers.recv_abort_timeout_s * 1e9),
    )


def _faults(scenario: Scenario, requests: tuple[Request, ...], prefill: Endpoint, decode: Endpoint) -> tuple[Fault, ...]:
    ranks = [*prefill.rank_names(), *decode.rank_names()]
    faults = []
    for index, given in enumerate(scenario.faults):
        place = f"faults[{index}]"
        fault = _fault(place, given)
        if isinstance(fault, KeyFault):
            named = list(fault.requests or ())
        else:
            named = [fault.request] if fault.request is not None else []
            _check_target(place, fault, ranks, named)
        for request in named:
            if request >= len(requests):
                raise InputError(place, f"there is no request {request}", f"use 0 to {len(requests) - 1}")
        faults.append(fault)
    return tuple(faults)


def _fault(place: str, given: dict[str, Any] | str) -> Fault:
    """A fault written as a shorthand or as a table."""
    try:
        if isinstance(given, str):
            return parse_fault(given)
        kind = given.get("kind")
        if kind in ("drop", "set", "rename"):
            _reject_unknown(KeyFault, given, place)
            return msgspec.convert(given, KeyFault)
        if "target" not in given or kind is None:
            raise InputError(place, f"{_short(given)} has no kind or no target", 'write it as "drop:remote_tp_size@prefill"')
        return msgspec.convert(given, EventFault)
    except FaultSyntaxError as error:
        raise InputError(place, str(error)) from None
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "")
        raise InputError(place, f"{_short(given)} is wrong", problem[0].lower() + problem[1:]) from None


def _check_target(place: str, fault: EventFault, ranks: list[str], named: list[int]) -> None:
    """Ranks and requests that an event fault names must exist."""
    syntax = KINDS[fault.kind].syntax
    if ":RANK" in syntax and fault.target not in ranks:
        raise InputError(place, f"there is no rank {fault.target!r}", nearest(fault.target, ranks))
    for name in (fault.sender, fault.receiver):
        if name is not None and name not in (*ranks, "P", "D", *(f"{r[0]}{r[1:].split('.')[0]}" for r in ranks)):
            raise InputError(place, f"there is no rank {name!r}", nearest(name, ranks))
    if ":REQUEST" in syntax:
        named.append(int(fault.target))


def _requests(scenario: Scenario) -> tuple[Request, ...]:
    wanted = scenario.requests
    if wanted is None:
        # One for each DP rank, so that a fault which only some DP ranks see is seen.
        wanted = max(scenario.prefill.dp, scenario.decode.dp)
    specs = wanted if isinstance(wanted, tuple) else (RequestSpec(),) * wanted
    if not specs:
        raise InputError("requests", "[] holds no request", "leave it out, or give a number such as 1")
    arrivals = _arrivals(scenario, len(specs))
    return tuple(_request(scenario, index, spec, arrivals[index]) for index, spec in enumerate(specs))


def _arrivals(scenario: Scenario, count: int) -> list[int]:
    """Poisson arrivals of the workload in ns, or all at once."""
    rate = scenario.workload.rate_per_s
    if rate is None:
        return [0] * count
    gaps = stream(scenario.seed, "arrivals").exponential(1e9 / rate, count)
    arrivals: list[int] = gaps.cumsum().astype("int64").tolist()
    return arrivals


def _request(scenario: Scenario, index: int, spec: RequestSpec, arrival_ns: int) -> Request:
    place = f"requests[{index}]"
    tokens = spec.prompt_tokens or scenario.prompt_tokens
    blocks = _blocks(tokens, scenario)
    for name, side in (("prefill", scenario.prefill), ("decode", scenario.decode)):
        dp = getattr(spec, f"{name}_dp")
        if dp is not None and dp >= side.dp:
            raise InputError(f"{place}.{name}_dp", f"{dp} is no DP rank", f"use 0 to {side.dp - 1} or raise {name}.dp")
        ids = getattr(spec, f"{name}_blocks")
        if ids is None:
            continue
        need = _blocks(tokens + side.lookahead_tokens, scenario)
        if len(ids) != need:
            raise InputError(f"{place}.{name}_blocks", f"{len(ids)} blocks for a prompt of {need}", f"give {need} block ids")
        if len(set(ids)) != len(ids):
            raise InputError(f"{place}.{name}_blocks", f"{_short(list(ids))} repeats a block", "give each block once")
    if spec.decode_hit_blocks > blocks:
        raise InputError(f"{place}.decode_hit_blocks", f"{spec.decode_hit_blocks} of {blocks} blocks", f"use at most {blocks}")
    return Request(
        index=index,
        arrival_ns=arrival_ns if spec.arrival_ns is None else spec.arrival_ns,
        prompt_tokens=tokens,
        blocks=blocks,
        plain=spec.plain,
        decode_hit_blocks=spec.decode_hit_blocks,
        external_zero=spec.external_zero,
        prefill_dp=index % scenario.prefill.dp if spec.prefill_dp is None else spec.prefill_dp,
        decode_dp=index % scenario.decode.dp if spec.decode_dp is None else spec.decode_dp,
        prefill_blocks=spec.prefill_blocks,
        decode_blocks=spec.decode_blocks,
    )


def _blocks(tokens: int, scenario: Scenario) -> int:
    return -(-tokens // scenario.block_size)


_DEFAULT_ADDRESS = {"prefill": ("10.0.0.1", 6301, 61005), "decode": ("10.0.0.2", 7301, 62005)}


def _endpoint(
    name: str, scenario: Scenario, geometry: Geometry, requests: tuple[Request, ...], release: ConnectorRelease
) -> Endpoint:
    side: Side = getattr(scenario, name)
    host, handshake_port, notify_port = _DEFAULT_ADDRESS[name]
    if side.dp % side.pods:
        raise InputError(f"{name}.pods", f"{side.pods} pods can't share {side.dp} DP ranks", f"use a divisor of {side.dp}")
    hosts = (side.host or host, *(f"{side.host or host}-pod{pod}" for pod in range(1, side.pods)))
    handshake_port, notify_port = side.handshake_port or handshake_port, side.notify_port or notify_port
    for field, port in (("handshake_port", handshake_port), ("notify_port", notify_port)):
        if port + side.dp * side.tp > 65536:
            room = 65536 - side.dp * side.tp
            raise InputError(f"{name}.{field}", f"{port} leaves no room for {side.dp * side.tp} ranks", f"use at most {room}")
    try:
        geometry.heads_of(0, side.tp)
    except PeerRefusal as error:
        sizes = [str(t) for t in range(1, 257) if geometry.kv_heads % t == 0 or t % geometry.kv_heads == 0]
        close = min(sizes, key=lambda t: abs(int(t) - side.tp))
        raise InputError(f"{name}.tp", f"{side.tp}: {error.text}", f"use {close}") from None
    shape = CacheShape(
        planes=geometry.planes,
        num_blocks=_pool_size(name, side, scenario, requests),
        block_size=scenario.block_size,
        heads=geometry.heads_per_rank(side.tp),
        head_bytes=geometry.head_bytes,
    )
    if shape.units > _MAX_CELLS:
        raise InputError(f"{name}.num_blocks", f"{shape.num_blocks} blocks are more than this machine should hold",
                         f"use at most {_MAX_CELLS * shape.num_blocks // shape.units}, or a shorter prompt")  # fmt: skip
    return Endpoint(
        letter=name[0].upper(),
        tp=side.tp,
        dp=side.dp,
        hosts=hosts,
        handshake_port=handshake_port,
        notify_port=notify_port,
        shape=shape,
        release=release.overridden(scenario.overrides),
        side=side,
    )


def _pool_size(name: str, side: Side, scenario: Scenario, requests: tuple[Request, ...]) -> int:
    """Blocks of a rank's pool: as asked, else twice what its requests need, and block 0, which vLLM never hands out.

    With a workload blocks are used again; without, all requests may be there at once and must fit.
    """
    need, highest, largest = [0] * side.dp, 0, 0
    for request in requests:
        size = _blocks(request.prompt_tokens + side.lookahead_tokens, scenario)
        need[getattr(request, f"{name}_dp")] += size
        largest = max(largest, size)
        highest = max(highest, *(getattr(request, f"{name}_blocks") or (0,)))
    size = side.num_blocks or max(2 * max(need) + 1, highest + 1)
    if largest > size - 1:
        raise InputError(f"{name}.num_blocks", f"{size} blocks can't hold a request of {largest}", f"use at least {largest + 1}")
    if highest >= size:
        raise InputError(f"{name}.num_blocks", f"{size} blocks have no block {highest}", f"use at least {highest + 1}")
    return size
