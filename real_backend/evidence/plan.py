"""Which scenarios are measured on which release: inputs, not results. The model runs them as they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcover.sim.releases.records import get_release
from kvcover.sim.scenario.endpoint import Endpoint
from kvcover.sim.scenario.routers import get_router
from kvcover.sim.scenario.scenario import Mode, Scenario, build
from kvcover.sim.scenario.setup import resolve

BLOCK_SIZE = 16

MLA, GQA8, GQA2 = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8", "layers=2,kv_heads=2,head_dim=8"
_SLIDING = "layers=4,kv_heads=8,head_dim=8,window=32,full_every=2"
_ALL_SLIDING = "layers=2,kv_heads=2,head_dim=8,window=40"
_GQA8_MLA = "layers=3,kv_heads=8,head_dim=8,mla=64+16,mla_every=2"
_GQA2_MLA = "layers=3,kv_heads=2,head_dim=8,mla=64+16,mla_every=2"
_MLA_GQA8 = "layers=3,mla=64+16,kv_heads=8,head_dim=8,gqa_every=2"
_GQA8_STATE = "layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=2"
_GQA2_STATE = "layers=4,kv_heads=2,head_dim=8,state=8x16,state_every=2"
_MLA_STATE = "layers=4,mla=64+16,state=8x16,state_every=2"
_GQA2_STATES = "layers=6,kv_heads=2,head_dim=8,state=8x16,state_every=3"
_LABELS = {
    MLA: "mla", GQA8: "gqa8", GQA2: "gqa2", _SLIDING: "sliding", _ALL_SLIDING: "all-sliding",
    _GQA8_MLA: "gqa8+mla", _GQA2_MLA: "gqa2+mla", _MLA_GQA8: "mla+gqa8",
    _GQA8_STATE: "gqa8+state", _GQA2_STATE: "gqa2+state", _MLA_STATE: "mla+state", _GQA2_STATES: "gqa2x2+state",
}  # fmt: skip

# Out of order and partly not adjacent, different on the two sides, so that shifted or merged ranges show.
_PREFILL_BLOCKS = ((2, 3, 5, 7), (8, 10, 12, 13), (14,))
_DECODE_BLOCKS = ((9, 4, 5, 11), (1, 6, 7, 13), (15,))
_LOOKAHEAD_BLOCKS = (3, 2)
_PROMPT_TOKENS = 64
_POOL = 16

_DROP = ("drop:remote_tp_size",)
_ONE = ("set:remote_tp_size=1",)
_KEY_FAULTS = (
    "set:remote_tp_size=4@prefill",
    "set:remote_tp_size=4",
    "set:remote_tp_size=1@prefill",
    "set:remote_tp_size=1@decode",
    "set:remote_tp_size=3@prefill",
    "set:remote_tp_size=-1@prefill",
    "set:remote_tp_size=null",
    'set:remote_tp_size="2"',
    'set:remote_tp_size="x"@prefill',
    "set:remote_tp_size=true",
    "drop:transfer_id@prefill",
    "drop:transfer_id@decode",
    "drop:transfer_id",
    "set:transfer_id=null",
    "set:transfer_id=-1",
    "set:transfer_id=0",
    'set:transfer_id=""',
    "set:transfer_id=[]",
    "drop:remote_block_ids@prefill",
    "drop:remote_engine_id@prefill",
    "drop:remote_dp_size",
    "set:remote_dp_size=2@prefill",
    "set:remote_dp_size=0@prefill",
    "set:remote_dp_rank=1@decode",
    "drop:do_remote_decode@prefill",
    "drop:do_remote_prefill@decode",
)
_READ_KEY_FAULTS = (
    "drop:remote_tp_size@decode",
    "set:remote_tp_size=1@decode",
    "set:remote_tp_size=4@decode",
    "set:remote_tp_size=3@decode",
    "set:remote_block_ids=null@decode",
    "drop:remote_engine_id@decode",
    "set:remote_dp_rank=1@decode",
    "drop:do_remote_prefill@decode",
    "drop:do_remote_decode@prefill",
    "drop:transfer_id@decode",
)
# Requests that run at decode while prefill still has something to say of them: whether decode wants nothing, and faults.
_RUNNING: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (False, ()),
    (True, ()),
    (True, ("set:is_request_leader=false@decode",)),
    (False, ("set:do_remote_prefill=false@decode",)),
)
_GENERATE_NS = 5_000_000_000
# Mode, TP sizes and DP size of both sides, faults: each leg gets what was meant for the other, or for the request before.
_SWAPPED: tuple[tuple[Mode, int, int, int, str], ...] = (
    ("write", 2, 4, 1, "swap:remote_tp_size"),
    ("write", 4, 2, 1, "swap:remote_tp_size@prefill"),
    ("write", 2, 2, 1, "swap:do_remote_prefill@decode"),
    ("read", 2, 4, 1, "swap:remote_tp_size@decode"),
    ("read", 2, 2, 1, "swap:remote_block_ids@prefill"),
)
_STALE: tuple[tuple[Mode, int, int, int, str], ...] = (
    ("write", 2, 2, 1, "stale:transfer_id"),
    ("write", 2, 2, 1, "stale:transfer_id@decode#1+"),
    ("write", 1, 1, 2, "stale:remote_dp_rank@decode"),
    ("read", 2, 2, 1, "stale:remote_block_ids@decode"),
    ("read", 2, 2, 1, "stale:transfer_id@decode"),
)
_MODES: tuple[Mode, Mode] = ("write", "read")
_RENAME = ("rename:remote_tp_size=tp_size@prefill",)


Engine = dict[str, Any]
"""Fields of a scenario's `prefill` or `decode` that are not as usual."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A scenario that is run on the real connector, under a name that says it all and sorts well."""

    id: str
    scenario: Scenario


def scenario_of(
    release: str,
    mode: Mode,
    prefill: Engine,
    decode: Engine,
    model: str,
    router: str,
    faults: tuple[str, ...] = (),
    requests: int = 1,
    request: dict[str, Any] | None = None,
    decode_release: str | None = None,
) -> Scenario:
    """`requests` requests as `request` says, spread over the engines' DP ranks, on blocks that show what goes astray."""
    fields = {
        "release": release,
        "decode_release": decode_release,
        "mode": mode,
        "prefill": {"num_blocks": _POOL, **prefill},
        "decode": {"num_blocks": _POOL, **decode},
        "model": model,
        "kv_dtype": "fp32",
        "block_size": BLOCK_SIZE,
        "prompt_tokens": _PROMPT_TOKENS,
        "router": router,
        "faults": list(faults),
        "fabric": "loopback",
    }
    setup = resolve(build({**fields, "requests": requests}))
    placed = [
        {
            "prefill_dp": index % setup.prefill.dp,
            "decode_dp": index % setup.decode.dp,
            "prefill_blocks": _blocks(setup.prefill, _PREFILL_BLOCKS[index:]),
            "decode_blocks": _blocks(setup.decode, _DECODE_BLOCKS[index:]),
            **(request or {}),
        }
        for index in range(requests)
    ]
    return build({**fields, "requests": placed})


def _blocks(endpoint: Endpoint, numbers: tuple[tuple[int, ...], ...]) -> list[int]:
    """The blocks of a request, table after table: each takes from a row of `numbers` what it allocates of the prompt."""
    prompt = _PROMPT_TOKENS // endpoint.shape.block_size
    blocks: list[int] = []
    for table, (skipped, count) in enumerate(endpoint.rows(_PROMPT_TOKENS)):
        blocks += numbers[table][skipped : min(count, prompt)]
        blocks += _LOOKAHEAD_BLOCKS[table : table + max(0, count - prompt)]
    return blocks


def _sizes(scenario: Scenario) -> str:
    """TP and DP of both engines in short."""
    engines = (("p", scenario.prefill), ("d", scenario.decode))
    return "".join(f"{letter}{side.tp}" + (f"x{side.dp}" if side.dp > 1 else "") for letter, side in engines)


def _planned(
    release: str,
    mode: Mode,
    prefill: Engine,
    decode: Engine,
    model: str,
    router: str,
    faults: tuple[str, ...] = (),
    requests: int = 1,
    request: dict[str, Any] | None = None,
) -> Planned:
    scenario = scenario_of(release, mode, prefill, decode, model, router, faults, requests, request)
    kind = [name for name, field in (("external_zero", "external_zero"), ("generating", "generate_ns")) if field in (request or {})]
    tail = "+".join([router.split()[0].removesuffix("-proxy").removeprefix("vllm-"), *kind, *faults])
    forms = [_form(engine) for engine in (prefill, decode)]
    caches = "caches=" + ">".join(form or "usual" for form in forms) if any(forms) else ""
    return Planned("/".join(filter(None, (release, mode, _sizes(scenario), _LABELS[model], caches, tail))), scenario)


def _form(engine: Engine) -> str:
    """Name what is unusual of an engine's caches."""
    parts = [engine.get("layout"), engine.get("order")]
    parts += [f"{short}{engine[name]}" if name in engine else "" for name, short in (("block_size", "bs"),)]
    parts += [engine.get("kv_dtype"), f"nb{engine['num_blocks']}" if "num_blocks" in engine else ""]
    parts += ["" if engine.get("hybrid_kv", True) else "one-table"]
    parts += [f"ahead{engine['lookahead_tokens']}" if "lookahead_tokens" in engine else ""]
    return ".".join(filter(None, parts))


@functools.cache
def planned(release: str) -> tuple[Planned, ...]:
    """The scenarios that are measured on one release, each once."""
    toy = get_router("toy-proxy", release).name
    return (
        *_tensor_parallel(release, toy),
        *_keys(release, toy),
        *_caches(release, toy),
        *_layers(release, toy),
        *_states(release, toy),
    )


def _tp(tp: int, **unusual: Any) -> Engine:
    return {"tp": tp, **unusual}


def _tensor_parallel(release: str, toy: str) -> Iterator[Planned]:
    """TP and DP sizes and heads, with the key that releases read for them and without."""

    def of(mode: Mode, p: int, d: int, model: str, router: str = toy, faults: tuple[str, ...] = ()) -> Planned:
        return _planned(release, mode, _tp(p), _tp(d), model, router, faults)

    for p, d in ((4, 4), (2, 4), (4, 2)):
        for model in (MLA, GQA8, GQA2):
            yield of("write", p, d, model)
    for p, d, faults in ((4, 4, _DROP), (4, 4, _ONE), (4, 2, _DROP), (2, 4, _DROP)):
        for model in (MLA, GQA8):
            yield of("write", p, d, model, faults=faults)
    yield of("write", 8, 8, MLA)
    if release in ("0.26.0", "0.27.0", "0.33.0"):
        yield of("write", 8, 8, GQA8)
    if release in ("0.26.0", "0.27.0", "0.32.0", "0.33.0"):
        yield of("write", 8, 4, MLA)
        yield of("write", 4, 8, MLA)
    if release == "0.26.0":
        yield of("write", 8, 8, MLA, faults=_RENAME)
    for dp_faults in ((), _DROP):
        yield _planned(release, "write", _tp(1), _tp(1, dp=2), MLA, toy, dp_faults, requests=2)
    for p, d in ((2, 4), (4, 2)):
        for model in (MLA, GQA2, GQA8):
            yield of("read", p, d, model)
    for model in (MLA, GQA8):
        yield of("read", 4, 4, model)
    for p, d in ((4, 4), (2, 4), (4, 2)):
        yield of("read", p, d, MLA, router="vllm-router 0.1.17")


def _keys(release: str, toy: str) -> Iterator[Planned]:
    """Faults of the router's keys, and requests that run on while prefill has something to say of them."""
    two = _tp(2)
    for fault in _KEY_FAULTS:
        yield _planned(release, "write", two, two, MLA, toy, (fault,))
    for zero, faults in _RUNNING:
        request = ({"external_zero": True} if zero else {}) | {"generate_ns": _GENERATE_NS}
        yield _planned(release, "write", two, two, MLA, toy, faults, request=request)
    for fault in _READ_KEY_FAULTS:
        yield _planned(release, "read", two, two, MLA, toy, (fault,))
    for requests, group in ((1, _SWAPPED), (2, _STALE)):
        for mode, p, d, dp, fault in group:
            # Where a step reads for one request only, it does so whatever their keys.
            if mode == "write" or requests == 1 or get_release(release).read_queue == "all":
                engines = (_tp(p, dp=dp), _tp(d, dp=dp))
                yield _planned(release, mode, *engines, MLA, toy, (fault,), requests)


# (prefill, decode, model) of both modes: caches that lie alike or not.
_INTERLEAVED, _PACKED, _HEAD_MAJOR = {"layout": "interleaved"}, {"layout": "packed"}, {"order": "HND"}
_SPLIT: Engine = {}
_MIXED = _INTERLEAVED | _HEAD_MAJOR
_LARGE_BLOCKS = {"block_size": 32}
_BF16, _FP16, _FP8 = {"kv_dtype": "bf16"}, {"kv_dtype": "fp16"}, {"kv_dtype": "fp8"}
_FORMS: tuple[tuple[Engine, Engine, str], ...] = (
    *((_tp(p, **form), _tp(d, **form), GQA8) for form in (_INTERLEAVED, _HEAD_MAJOR, _PACKED) for p, d in ((2, 2), (2, 4), (4, 2))),
    *(
        (_tp(1, **here), _tp(1, **there), GQA8)
        for here, there in (
            (_INTERLEAVED, _SPLIT),
            (_SPLIT, _INTERLEAVED),
            (_SPLIT, _HEAD_MAJOR),
            (_MIXED, _SPLIT),
            (_PACKED, _SPLIT),
            (_SPLIT, _LARGE_BLOCKS),
            (_LARGE_BLOCKS, _SPLIT),
            (_BF16, _FP16),
            (_FP8, _BF16),
            (_BF16, _FP8),
        )
    ),
    (_tp(4, **_INTERLEAVED), _tp(2), GQA8),
    (_tp(2, **_MIXED), _tp(4), GQA8),
    *((_tp(1, num_blocks=24, **form), _tp(1, **form), GQA8) for form in (_SPLIT, _INTERLEAVED)),
    (_tp(1, **_LARGE_BLOCKS), _tp(1), MLA),
    (_tp(1), _tp(1, **_LARGE_BLOCKS), MLA),
    (_tp(1, **_BF16), _tp(1, **_FP8), MLA),
    (_tp(1, layout="latent"), _tp(1, layout="latent"), MLA),
    (_tp(1, layout="standard"), _tp(1, layout="standard"), MLA),
)


def _caches(release: str, router: str) -> Iterator[Planned]:
    """Caches that lie otherwise than usual, or not alike."""
    for mode in _MODES:
        for prefill, decode, model in _FORMS:
            yield _planned(release, mode, prefill, decode, model, router)


def _layers(release: str, router: str) -> Iterator[Planned]:
    """Models whose layers are not all alike."""
    record = get_release(release)

    def of(mode: Mode, prefill: Engine, decode: Engine, model: str) -> Planned:
        return _planned(release, mode, prefill, decode, model, router)

    off = _tp(1, hybrid_kv=False)
    if record.hybrid_manager == "off":  # all have one table
        for mode in _MODES:
            yield of(mode, off, off, _SLIDING)
            for model, (p, d) in itertools.product((_GQA8_MLA, _MLA_GQA8), ((2, 4), (4, 2))):
                yield of(mode, _tp(p, hybrid_kv=False), _tp(d, hybrid_kv=False), model)
        return
    for mode in _MODES:
        for p, d in ((1, 1), (2, 2)):
            yield of(mode, _tp(p), _tp(d), _SLIDING)
        yield of(mode, _tp(1), _tp(1), _ALL_SLIDING)
    yield of("read", _tp(2), _tp(4), _ALL_SLIDING)
    yield of("read", _tp(1), _tp(1, lookahead_tokens=1), _SLIDING)
    yield of("read", _tp(1), off, _SLIDING)
    yield of("read", off, _tp(1), _SLIDING)
    yield of("read", off, _tp(1), _ALL_SLIDING)
    for mode in _MODES:
        yield of(mode, off, off, _SLIDING)
    one_table = {"hybrid_kv": False} if record.mixed_layers == "hybrid_off" else {}
    for model in (_GQA8_MLA, _GQA2_MLA, _MLA_GQA8):
        for mode in _MODES:
            for p, d in ((2, 2), (2, 4), (4, 2)):
                yield of(mode, _tp(p, **one_table), _tp(d, **one_table), model)
            if one_table:
                yield of(mode, _tp(2), _tp(2), model)


# On releases that start a model with recurrent states: mode, TP sizes, model, faults.
_WITH_STATES: tuple[tuple[Mode, int, int, str, tuple[str, ...]], ...] = (
    *(("read", p, d, _GQA8_STATE, ()) for p, d in ((2, 2), (2, 4), (4, 2))),
    *(("write", p, d, model, ()) for model in (_GQA8_STATE, _GQA2_STATE, _MLA_STATE) for p, d in ((2, 2), (2, 4), (4, 2))),
    ("write", 4, 1, _GQA2_STATE, ()),
    ("read", 2, 2, _MLA_STATE, ()),
    *((mode, 1, 1, _GQA2_STATES, ()) for mode in _MODES),
    ("write", 2, 2, _GQA8_STATE, _DROP),
    ("write", 2, 4, _GQA8_STATE, _DROP),
    ("write", 4, 2, _GQA8_STATE, _DROP),
    ("write", 2, 2, _GQA8_STATE, ("set:remote_tp_size=4@prefill",)),
    ("read", 2, 2, _GQA8_STATE, ("drop:remote_tp_size@decode",)),
    ("read", 2, 2, _GQA8_STATE, ("drop:remote_tp_size@decode", "drop:tp_size@decode")),
)


def _states(release: str, router: str) -> Iterator[Planned]:
    """Models with recurrent states; before 0.31 they don't start."""
    if get_release(release).states == "refused":
        for mode in _MODES:
            yield _planned(release, mode, _tp(1), _tp(1), _GQA8_STATE, router)
        return
    for mode, p, d, model, faults in _WITH_STATES:
        starts = mode == "read" or get_release(release).states == "read_write"
        if starts or (p, d, model, faults) == (2, 2, _GQA8_STATE, ()):
            yield _planned(release, mode, _tp(p), _tp(d), model, router, faults)
