"""The scenario: one strict, versioned description that every tier runs.

`load` reads TOML or JSON, `build` turns a plain dictionary into a `Scenario`, `Setup` is a scenario with every name
looked up and every default filled in. All of them raise InputError with the place, the value and the nearest right one.
"""

from __future__ import annotations

import functools
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
from faults.read import UnfitJson, plain_json, too_deep, unicode
from sim.clock import stream
from sim.errors import InputError, PeerRefusal, nearest, short
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
Host = Annotated[str, Meta(pattern="^[!-~]+$", max_length=253)]
Block = Annotated[int, Meta(ge=1, le=1 << 20)]  # vLLM never hands out block 0
_MAX_CELLS = 1 << 24  # of one rank and layer
_MAX_NEEDED = 1 << 27  # cells of all requests on all ranks: 3 GB
_MAX_EVENTS = 20_000_000  # minutes, and 3 GB


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
    host: Host | None = None
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

    `plain` carries no `kv_transfer_params`. `decode_hit_blocks` of its blocks are in decode's prefix cache;
    with `suffix_only` the connector is handed only the others, as a scheduler that reads what it lacks would.
    `external_zero`: decode's scheduler asks for nothing from prefill, as for a request with `prompt_logprobs`.
    """

    arrival_ns: Nanoseconds | None = None
    plain: bool = False
    decode_hit_blocks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    suffix_only: bool = False
    external_zero: bool = False
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    prefill_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    decode_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    prefill_blocks: tuple[Block, ...] | None = None
    decode_blocks: tuple[Block, ...] | None = None


class Workload(_Strict, frozen=True):
    """When requests arrive: at `rate_per_s` on average (Poisson, from the seed), and at most `concurrency` at a time."""

    rate_per_s: Annotated[float, Meta(ge=1e-3, le=10**6)] | None = None
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
    place, example = str(path) or "''", "see `kvcover run --help` for an example"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(place, f"can't be read: {error.strerror or error}", "give the path of a scenario file") from None
    except UnicodeDecodeError:
        raise InputError(place, "is not UTF-8 text", "give a TOML or JSON file") from None
    kind = "JSON" if place.endswith(".json") else "TOML"
    try:
        data = plain_json(text) if kind == "JSON" else tomllib.loads(text)
    except UnfitJson as error:
        raise InputError(place, str(error), example) from None
    except RecursionError:
        raise InputError(place, "is nested too deeply", example) from None
    except ValueError as error:
        if "digits" in str(error):
            raise InputError(place, "holds a number of too many digits", "use a shorter one") from None
        raise InputError(place, f"is not {kind}: {error}", example) from None
    if not isinstance(data, dict):
        raise InputError(place, "holds no table of fields", example)
    return data


def build(data: Mapping[str, Any]) -> Scenario:
    """Convert and check; raises InputError naming the field, its value and the nearest right one.

    Faults written as tables become shorthands, which is how results and replay lines tell them.
    """
    check_tables(data)
    _check_plain(data, "")
    _reject_unknown(Scenario, data, "")
    try:
        scenario = msgspec.convert(data, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(error, data, Scenario, "") from None
    faults = tuple(str(fault_of(f"faults[{index}]", given)) for index, given in enumerate(scenario.faults))
    return msgspec.structs.replace(scenario, faults=faults)


def set_field(data: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b.c` in nested dictionaries; list positions are numbers. Raises InputError when there is no such place."""
    *parents, last = path.split(".")
    if len(parents) > 8:
        raise InputError(f"--set {path[:40]}...", "is nested too deeply", "name a field such as timers.defer_timeout_s")
    here: Any = data
    for part in parents:
        spot = _spot(here, part, path)
        here = here.setdefault(spot, {}) if isinstance(here, dict) else here[spot]
    here[_spot(here, last, path)] = value


def _spot(here: Any, part: str, path: str) -> Any:
    """`part` as a key of a dictionary or as a position in a list."""
    is_number = part.isascii() and part.isdecimal() and len(part) < 6
    if isinstance(here, list) and is_number and int(part) < len(here):
        return int(part)
    if isinstance(here, dict) and part and not is_number:
        return part
    hint = "name a field such as timers.defer_timeout_s"
    if isinstance(here, list) and here:
        hint = f"use 0 to {len(here) - 1}"
    elif is_number:
        hint = f"a list must be there first: --set '{path.partition('.')[0]}=[{{}}]'"
    raise InputError(f"--set {path}", f"there is nothing at {part!r}", hint)


# -- saying what is wrong ----------------------------------------------------------------------------------------

_EXAMPLES = {
    "prefill": "{tp = 4}", "decode": "{tp = 4}", "timers": "{defer_timeout_s = 5}", "timing": "{message_ns = 50000}",
    "workload": "{concurrency = 4}", "rdma": "{queue_pairs = 1}", "overrides": '{ports = "dp_plus_tp"}',
    "expect": '{outcome = "ok"}', "faults": '["drop:remote_tp_size"]', "requests": "4 or [{prompt_tokens = 32}]",
    "fabric": '"cx7" or {write_fixed_ns = 5850, write_gb_per_s = 48.8, read_fixed_ns = 6550, read_gb_per_s = 43.9}',
    "prefill.host": "10.0.0.1", "decode.host": "10.0.0.2", "requests[]": "{prompt_tokens = 32}",
    "faults[]": '"drop:remote_tp_size"', "faults[].requests": "[0], or leave it out",
}  # fmt: skip


def check_tables(data: Mapping[str, Any]) -> None:
    """Raise InputError for a field that must be a table and is none, so that options can be put into it."""
    for name in ("prefill", "decode", "timers", "timing", "workload", "rdma", "overrides"):
        if not isinstance(data.get(name, {}), Mapping):
            raise InputError(name, f"{short(data[name])} is wrong", f"expected a table such as {_EXAMPLES[name]}")


def _check_plain(value: Any, place: str) -> None:
    """Raise InputError for what no field can hold: text that is not Unicode, endless digits, endless nesting."""
    if isinstance(value, Mapping):
        if too_deep(dict(value)):
            raise InputError(place or "scenario", f"{short(value)} is nested too deeply", "use plain values, lists and tables")
        for key, inner in value.items():
            _check_plain(key, place or "scenario")
            _check_plain(inner, _join(place, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{place}[{index}]")
    elif isinstance(value, str) and not unicode(value):
        raise InputError(place, f"{short(value)} is not text", "use Unicode characters, in UTF-8")
    elif isinstance(value, int) and abs(value) >= 10**30:
        raise InputError(place, "a number of more than 30 digits", "use a smaller one")


def _join(place: str, key: object) -> str:
    """The place of a field; keys that are no names are quoted."""
    name = key if isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else short(key)
    return f"{place}.{name}" if place else str(name)


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a struct by the names that people write, with their types."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


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
    fields = _fields(struct)
    for key, value in data.items():
        _reject_name(key, value, list(fields), place)
        inner = _struct_in(fields[key])
        if inner is not None:
            _reject_unknown(inner, value, _join(place, key))


def _reject_name(key: Any, value: Any, names: list[str], place: str) -> None:
    if key not in names:
        raise InputError(_join(place, key), f"no such field (its value is {short(value)})", nearest(str(key), names))


_AT = re.compile(r" - at `\$(.*)`$")
_EXPECTED = re.compile(r"Expected `([^`]*)`(?:, got `[^`]*`)?(.*)", re.DOTALL)
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "object": "a table",
          "array": "a list"}  # fmt: skip


def _explain(error: msgspec.ValidationError, data: Any, struct: type[msgspec.Struct], place: str) -> InputError:
    """msgspec's complaint about `data`, which lies at `place`, in the words of those who write scenarios."""
    text = str(error)
    match = _AT.search(text)
    path, problem = (match[1].lstrip("."), text[: match.start()]) if match else ("", text)
    if path.endswith("[...]"):  # msgspec names no key of a dictionary; only `overrides` is one
        path = path.removesuffix("[...]")
        path += "." + next(key for key, value in _value_at(data, path).items() if not isinstance(value, str))
    value, where = short(_value_at(data, path)), ".".join(part for part in (place, path) if part) or "scenario"
    if choices := _choices_at(struct, path):
        hint = nearest(_value_at(data, path), choices) if isinstance(_value_at(data, path), str) else "use " + " or ".join(choices)
        return InputError(where, f"{value} is not one of its values", hint)
    return InputError(where, f"{value} is wrong", _in_words(problem, re.sub(r"\[[0-9]+\]", "[]", where)))


def _in_words(problem: str, where: str) -> str:
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"it has no field {missing[1]!r}, which it needs"
    match = _EXPECTED.fullmatch(problem)
    if match is None:
        return problem[0].lower() + problem[1:].replace("`", "")
    kinds, rest = [kind for kind in match[1].split(" | ") if kind != "null"], match[2]
    if "matching regex" in rest:
        rest = " without spaces"
    example = _EXAMPLES.get(where)
    return f"expected {' or '.join(_WORDS.get(kind, kind) for kind in kinds)}{rest}" + (f", such as {example}" if example else "")


def _value_at(data: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            data = data[int(part)] if isinstance(data, (list, tuple)) else data[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return data
    return data


def _choices_at(struct: type[msgspec.Struct], path: str) -> list[str]:
    """The values of the Literal at a path, as text."""
    annotation: Any = struct
    for part in re.findall(r"[^.\[\]]+", path):
        if not part.isdecimal():
            inner = _struct_in(annotation)
            annotation = _fields(inner).get(part) if inner else None
    return _literals(annotation)


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [choice for inner in typing.get_args(annotation) for choice in _literals(inner)]
    return []


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
    suffix_only: bool
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
    _check_expect(scenario)
    _check_work(geometry, requests, prefill, decode)
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
        fault = fault_of(place, given)
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


def fault_of(place: str, given: dict[str, Any] | str) -> Fault:
    """A fault written as a shorthand or as a table."""
    try:
        return parse_fault(given) if isinstance(given, str) else _fault_in_table(place, given)
    except FaultSyntaxError as error:
        raise InputError(f"{place}.{error.field}" if error.field else place, str(error)) from None


def _fault_in_table(place: str, given: dict[str, Any]) -> Fault:
    kind = given.get("kind")
    if kind is None:
        raise InputError(
            place, f"{short(given)} has no kind", 'write kind = "drop", or "drop:remote_tp_size@prefill" for all of it'
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"{place}.kind", f"no fault kind {short(kind)}", nearest(str(kind), KINDS))
    is_key_fault = KINDS[kind].point == "params"
    struct: type[KeyFault | EventFault] = KeyFault if is_key_fault else EventFault
    names = list(_fields(KeyFault)) if is_key_fault else ["kind", "target", *KINDS[kind].params]
    for key, value in given.items():
        _reject_name(key, value, names, place)
    try:
        return msgspec.convert(given, struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, FaultSyntaxError):
            raise error.__cause__ from None
        raise _explain(error, given, struct, place) from None


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


def _near_rank(name: str, ranks: list[str]) -> str:
    """The nearest rank, or all of them when they are few."""
    if len(ranks) <= 16:
        return nearest(name.upper(), ranks)
    prefill = [rank for rank in ranks if rank.startswith("P")]
    return f"use {prefill[0]} to {prefill[-1]} or {ranks[len(prefill)]} to {ranks[-1]}"


def _check_expect(scenario: Scenario) -> None:
    expected = scenario.expect.by_rank if scenario.expect else None
    there_are = scenario.decode.dp * scenario.decode.tp
    if expected is not None and len(expected) != there_are:
        raise InputError("expect.by_rank", f"{len(expected)} numbers for {there_are} decode ranks", f"give {there_are}")


def _check_work(geometry: Geometry, requests: tuple[Request, ...], prefill: Endpoint, decode: Endpoint) -> None:
    """Refuse what would run for hours or fill the memory, in steps of ranks and in cells, before it begins."""
    ranks = prefill.tp + decode.tp
    step = prefill.side.max_tokens_per_step
    steps = sum(-(-request.prompt_tokens // step) if step else 1 for request in requests)
    events = steps * geometry.layers * ranks + prefill.tp * prefill.dp * decode.dp
    if events > _MAX_EVENTS:
        smaller = "max_tokens_per_step gives many steps: raise it, or lower" if steps > len(requests) else "lower"
        raise InputError(
            "scenario",
            f"{len(requests)} requests × {geometry.layers} layers × TP {prefill.tp} + {decode.tp} are some {events} events, "
            f"more than the {_MAX_EVENTS} that end in minutes",
            f"{smaller} requests, the model's layers or tp",
        )
    heads = geometry.heads_per_rank(prefill.tp) * prefill.tp + geometry.heads_per_rank(decode.tp) * decode.tp
    cells = sum(request.blocks for request in requests) * geometry.planes * heads
    if cells > _MAX_NEEDED:
        problem = f"its requests have {cells} cells on all ranks, more than the {_MAX_NEEDED} that fit in memory"
        raise InputError("scenario", problem, "lower requests, prompt_tokens or tp")


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
            raise InputError(f"{place}.{name}_blocks", f"{short(list(ids))} repeats a block", "give each block once")
    if spec.decode_hit_blocks > blocks:
        raise InputError(f"{place}.decode_hit_blocks", f"{spec.decode_hit_blocks} of {blocks} blocks", f"use at most {blocks}")
    return Request(
        index=index,
        arrival_ns=arrival_ns if spec.arrival_ns is None else spec.arrival_ns,
        prompt_tokens=tokens,
        blocks=blocks,
        plain=spec.plain,
        decode_hit_blocks=spec.decode_hit_blocks,
        suffix_only=spec.suffix_only,
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
    _check_ports(name, handshake_port, notify_port, side.dp * side.tp)
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


def _check_ports(name: str, handshake_port: int, notify_port: int, ranks: int) -> None:
    """Each rank has a port of both kinds: two ranges that must fit and not overlap."""
    if 2 * ranks > 65535:
        raise InputError(name, f"{ranks} ranks need two ports each, and there are 65535", "lower tp or dp")
    for field, port in (("handshake_port", handshake_port), ("notify_port", notify_port)):
        if port + ranks > 65536:
            raise InputError(f"{name}.{field}", f"{port} leaves no room for {ranks} ranks", f"use at most {65536 - ranks}")
    if abs(handshake_port - notify_port) < ranks:
        problem = f"{notify_port} overlaps the handshake ports, {ranks} from {handshake_port} on"
        raise InputError(f"{name}.notify_port", problem, f"keep them at least {ranks} apart")


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
