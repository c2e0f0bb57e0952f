"""The scenario: one strict, versioned description that every tier runs.

`load` reads TOML or JSON and `build` turns a plain dictionary into a `Scenario`. Both raise InputError with the place,
the value and the nearest right one. A scenario with every name looked up and every default filled in is a
`kvcover.sim.scenario.setup.Setup`.
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

from kvcover.faults import KINDS, EventFault, Fault, FaultSyntaxError, KeyFault, parse_fault
from kvcover.faults.read import UnfitJson, plain_json, too_deep, unicode
from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.releases.records import NEWEST
from kvcover.sim.scenario.fabric import FabricSpec
from kvcover.sim.scenario.routers import TOY_PROXY

Mode = Literal["write", "read"]
KvDtype = Literal["fp8", "bf16", "fp16", "fp32"]
Layout = Literal["split", "interleaved", "packed", "standard", "latent"]
BlockSize = Annotated[int, Meta(ge=1, le=1024)]
Size = Annotated[int, Meta(ge=1, le=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Blocks = Annotated[int, Meta(ge=1, le=1 << 20)]
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15)]
Seconds = Annotated[float, Meta(gt=0, le=10**6)]
Host = Annotated[str, Meta(pattern="^[!-~]+$", max_length=253)]
Block = Annotated[int, Meta(ge=1, le=1 << 20)]  # vLLM never hands out block 0


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are errors; defaults are left out when written."""


class Side(_Strict, frozen=True):
    """One engine: `tp` ranks for each of `dp` data-parallel ranks; `num_blocks` a rank's KV pool.

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
    """One request; what is left out is filled in: ranks in turn, blocks from the pool.

    `plain` carries no `kv_transfer_params`. `decode_hit_blocks` of its blocks are in decode's prefix cache;
    with `suffix_only` the connector is handed only the others, as a scheduler that reads what it lacks would.
    `external_zero`: decode's scheduler asks for nothing from prefill, as for a request with `prompt_logprobs`.
    `generate_ns`: how long it goes on after its first token, with its blocks and its transfer id.
    """

    arrival_ns: Nanoseconds | None = None
    plain: bool = False
    decode_hit_blocks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    suffix_only: bool = False
    external_zero: bool = False
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    generate_ns: Nanoseconds | None = None
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
    """What `--check` compares the result with; without it, `--check` wants `ok`, `refused` or `recomputed`.

    `race` says whether a race is to be found, on a tier that sees what orders events; left open, `--check` allows none.
    """

    outcome: Outcome | None = None
    coverage: Annotated[float, Meta(ge=0, le=1)] | None = None
    by_rank: tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None = None
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
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 256
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
