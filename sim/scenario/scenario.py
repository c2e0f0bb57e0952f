"""The scenario: one strict, versioned description that every tier runs.

`load` reads TOML or JSON and `build` turns a plain dictionary into a `Scenario`. Both raise InputError with the place,
the value and the nearest right one. A scenario with every name looked up and every default filled in is a
`kvcover.sim.scenario.setup.Setup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvcover.faults import KINDS, EventFault, Fault, FaultSyntaxError, KeyFault, parse_fault
from kvcover.faults.read import UnfitJson, plain_json, plain_toml
from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.files import MB, read_text
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.scenario.complaints import EXAMPLES, check_plain, explain, fields_of, in_tables, reject_name, reject_unknown
from kvcover.sim.scenario.fabric import FabricSpec
from kvcover.sim.scenario.routers import TOY_PROXY

Mode = Literal["write", "read"]
KvDtype = Literal["fp8", "bf16", "fp16", "fp32"]
Layout = Literal["split", "interleaved", "packed", "standard", "latent"]
BlockSize = Annotated[int, Meta(ge=1, le=1024, extra_json_schema={"unit": "tokens"})]
Size = Annotated[int, Meta(ge=1, le=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Blocks = Annotated[int, Meta(ge=1, le=1 << 20, extra_json_schema={"unit": "blocks"})]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24, extra_json_schema={"unit": "tokens"})]
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15, extra_json_schema={"unit": "ns"})]
Seconds = Annotated[float, Meta(gt=0, le=10**6, extra_json_schema={"unit": "s"})]
Share = Annotated[float, Meta(ge=0, le=1, extra_json_schema={"unit": "share of cells"})]
Host = Annotated[str, Meta(pattern="^[!-~]+$", max_length=253)]
Block = Annotated[int, Meta(ge=1, le=1 << 20)]  # vLLM never hands out block 0


_MOST_BYTES = 4 * MB
_MOST_FAULTS = 1000


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are errors; defaults are left out when written."""


class Side(_Strict, frozen=True):
    """One engine: `tp` ranks for each of `dp` data-parallel ranks; `num_blocks` a rank's KV pool.

    `instances` such engines register with the router, each with hosts of its own. DP ranks are numbered through all of them:
    of two instances with DP 2, `P2` is the first rank of the second.

    `pp` pipeline stages on one host would take the same ports, as no release counts them: the engine never starts.

    `pods` hosts share the DP ranks evenly. `max_tokens_per_step` splits prompts into chunks (prefill). `lookahead_tokens`
    are allocated beyond the prompt (speculative decoding). With `collectives` a TP rank that stalls in a layer stalls the
    others; the executor kills an engine whose step takes longer than `executor_timeout_s`. `hybrid_kv` false is vLLM's
    `--disable-hybrid-kv-cache-manager`: sliding-window layers are kept like all others, and recurrent states do not start.

    `layout` says how a layer's cache lies in memory: K and V `split` `[2, blocks, …]` (the default) or `interleaved`
    `[blocks, 2, …]`, both token-major (`order` NHD, the default) or head-major (HND); `packed` `[blocks, heads, tokens, K
    and V]`; `standard` `[B, H, N, C]`, which is that for K/V and `[blocks, 1, tokens, latent]` for MLA; `latent`
    `[blocks, tokens, latent]`. `block_size` and `kv_dtype` are the scenario's unless said.
    """

    tp: Size = 1
    dp: Size = 1
    pp: Annotated[int, Meta(ge=1, le=64)] = 1
    pods: Size = 1
    instances: Annotated[int, Meta(ge=1, le=16)] = 1
    host: Host | None = None
    handshake_port: Port | None = None
    notify_port: Port | None = None
    num_blocks: Blocks | None = None
    max_tokens_per_step: Tokens | None = None
    lookahead_tokens: Annotated[int, Meta(ge=0, le=1 << 16, extra_json_schema={"unit": "tokens"})] = 0
    cuda_graphs: Literal["none", "piecewise", "full"] = "none"
    collectives: bool = False
    executor_timeout_s: Seconds | None = 300.0
    load_failure: Literal["fail", "recompute"] = "fail"
    layout: Layout | None = None
    order: Literal["NHD", "HND"] | None = None
    block_size: BlockSize | None = None
    kv_dtype: KvDtype | None = None
    hybrid_kv: bool = True


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
    """One request; what is left out is filled in: ranks in turn, instances as the router chooses, blocks from the pool.

    `prefill_dp` and `decode_dp` are DP ranks of the instance that it is sent to.

    `plain` carries no `kv_transfer_params`. `decode_hit_blocks` of its blocks are in decode's prefix cache;
    with `suffix_only` the connector is handed only the others, as a scheduler that reads what it lacks would.
    `external_zero`: decode's scheduler asks for nothing from prefill, as for a request with `prompt_logprobs`.
    `generate_ns`: how long it goes on after its first token, with its blocks and its transfer id.
    """

    arrival_ns: Nanoseconds | None = None
    plain: bool = False
    decode_hit_blocks: Annotated[int, Meta(ge=0, le=1 << 20, extra_json_schema={"unit": "blocks"})] = 0
    suffix_only: bool = False
    external_zero: bool = False
    prompt_tokens: Tokens | None = None
    generate_ns: Nanoseconds | None = None
    prefill_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    decode_dp: Annotated[int, Meta(ge=0, le=255)] | None = None
    prefill_instance: Annotated[int, Meta(ge=0, le=15)] | None = None
    decode_instance: Annotated[int, Meta(ge=0, le=15)] | None = None
    prefill_blocks: tuple[Block, ...] | None = None
    decode_blocks: tuple[Block, ...] | None = None


class Workload(_Strict, frozen=True):
    """When requests arrive: at `rate_per_s` on average (Poisson, from the seed), and at most `concurrency` at a time."""

    rate_per_s: Annotated[float, Meta(ge=1e-3, le=10**6, extra_json_schema={"unit": "requests/s"})] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=4096)] | None = None


class Rdma(_Strict, frozen=True):
    """MoRI's queue pairs a transfer, depth of each send queue (work requests), and how long a post waits for room."""

    queue_pairs: Annotated[int, Meta(ge=1, le=64)] = 1
    sq_depth: Annotated[int, Meta(ge=1, le=1 << 20, extra_json_schema={"unit": "work requests"})] = 8192
    sq_wait_s: Seconds = 5.0


Outcome = Literal["ok", "refused", "recomputed", "failed", "degraded", "leak", "hang", "crash", "corrupt", "vacuous"]


class Expect(_Strict, frozen=True):
    """What a result is compared with, by `--check` too, which wants `ok`, `refused` or `recomputed` where no outcome is named.

    `told` are the decode ranks that are told that their blocks are there. `race` says whether a race is to be found, on a tier
    that sees what orders events; left open, `--check` allows none.
    """

    outcome: Outcome | None = None
    coverage: Share | None = None
    by_rank: tuple[Share, ...] | None = None
    told: tuple[str, ...] | None = None
    race: bool | None = None


class Scenario(_Strict, frozen=True):
    """Everything that decides a run. The same scenario and seed give the same history on the model tier."""

    schema: Literal[1] = 1
    release: str = NEWEST
    decode_release: str | None = None
    mode: Mode = "write"
    model: str = "llama-3.1-8b"
    kv_dtype: KvDtype = "bf16"
    block_size: BlockSize = 16
    prompt_tokens: Tokens = 256
    generate_ns: Nanoseconds = 0
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
    """The dictionary in a TOML or JSON file; `build` makes it a Scenario. Raises InputError for a file that holds none.

    >>> load("no-such.toml")
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: no-such.toml: can't be read: No such file or directory; give the path of a scenario file
    """
    place, example = str(path) or "''", "see `kvcover run --help` for an example"
    text = read_text(path, _MOST_BYTES, "give the path of a scenario file")
    kind = "JSON" if place.endswith(".json") else "TOML"
    try:
        data = plain_json(text) if kind == "JSON" else plain_toml(text)
    except UnfitJson as error:
        raise InputError(place, str(error), example) from None
    except RecursionError:
        raise InputError(place, "is nested too deeply", example) from None
    except ValueError as error:
        if "digits" in str(error):
            raise InputError(place, "holds a number of too many digits", "use a shorter one") from None
        raise InputError(place, f"is not {kind}: {error}", example) from None
    if not isinstance(data, dict) or not data:
        raise InputError(place, "holds no field" if data == {} else "holds no table of fields", example)
    return data


def build(data: Mapping[str, Any]) -> Scenario:
    """The scenario that plain data, such as that of `load`, describes.

    Faults written as tables become shorthands, which is how results and replay lines tell them. Raises InputError naming the
    field, its value and the nearest right one:

    >>> build({"release": "0.26.0", "prefill": {"tp": 8}}).prefill.tp
    8
    >>> build({"mode": "wirte"})
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: mode: 'wirte' is not one of its values; did you mean 'write'?
    """
    if not isinstance(data, Mapping):
        raise InputError("scenario", f"{short(data)} is no table of fields", 'give one such as {"release": "0.27.0"}')
    check_tables(data)
    check_plain(data, "")
    reject_unknown(Scenario, data, "")
    try:
        scenario = msgspec.convert(data, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise explain(error, data, Scenario, "") from None
    check_fault_count(scenario)
    faults = tuple(str(fault_of(f"faults[{index}]", given)) for index, given in enumerate(scenario.faults))
    return msgspec.structs.replace(scenario, faults=faults)


def checked(scenario: Scenario) -> Scenario:
    """The same scenario, each field of which holds what it may; raises InputError as `build` does.

    Making a struct checks nothing, and anybody can write `Side(tp=-1)`. Reading again what the struct writes is the quick
    way to know, in microseconds, as a swarm can afford; only what comes back changed is looked at field by field.
    """
    try:
        again = _READ_AGAIN.decode(msgspec.json.encode(scenario))
        if again == scenario:
            return again
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        pass
    return build(in_tables(scenario, Scenario, ""))


_READ_AGAIN = msgspec.json.Decoder(Scenario, strict=True)


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


def check_tables(data: Mapping[str, Any]) -> None:
    """Raise InputError for a field that must be a table and is none, so that options can be put into it."""
    for name in ("prefill", "decode", "timers", "timing", "workload", "rdma", "overrides"):
        if not isinstance(data.get(name, {}), Mapping):
            raise InputError(name, f"{short(data[name])} is wrong", f"expected a table such as {EXAMPLES[name]}")


def check_fault_count(scenario: Scenario) -> None:
    """Raise InputError for more faults than end in seconds, and than anybody can tell apart."""
    if len(scenario.faults) > _MOST_FAULTS:
        raise InputError("faults", f"{len(scenario.faults)} of them are too many to tell apart", f"use at most {_MOST_FAULTS}")


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
    names = list(fields_of(KeyFault)) if is_key_fault else ["kind", "target", *KINDS[kind].params]
    for key, value in given.items():
        reject_name(key, value, names, place)
    try:
        return msgspec.convert(given, struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, FaultSyntaxError):
            raise error.__cause__ from None
        raise explain(error, given, struct, place) from None
