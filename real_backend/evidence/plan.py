"""Which cells are measured on which release: a table of scenarios, not of results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvcover.faults import Injector, parse_fault
from kvcover.real_backend.driver.case import USUAL_POOL, CacheForm, ConnectorCase, EngineSize, Mode, ModelShape, RequestCase, Side
from kvcover.sim.releases.records import get_release
from kvcover.sim.scenario.dispatch import Dispatch
from kvcover.sim.scenario.routers import get_router

_MLA = ModelShape(layers=2)
_GQA8 = ModelShape(layers=2, kv_heads=8, head_dim=8)
_GQA2 = ModelShape(layers=2, kv_heads=2, head_dim=8)
_SLIDING = ModelShape(layers=4, kv_heads=8, head_dim=8, window=32, minor=ModelShape(4, kv_heads=8), minor_layers=(1, 3))
_ALL_SLIDING = ModelShape(layers=2, kv_heads=2, head_dim=8, window=40)
_GQA8_MLA = ModelShape(layers=3, kv_heads=8, head_dim=8, minor=ModelShape(3), minor_layers=(1,))
_GQA2_MLA = ModelShape(layers=3, kv_heads=2, head_dim=8, minor=ModelShape(3), minor_layers=(1,))
_MLA_GQA8 = ModelShape(layers=3, minor=ModelShape(3, kv_heads=8), minor_layers=(1,))
_STATE8 = ModelShape(layers=4, kv_heads=8, head_dim=16, state=True)
_GQA8_STATE = ModelShape(layers=4, kv_heads=8, head_dim=8, minor=_STATE8, minor_layers=(1, 3))
_GQA2_STATE = ModelShape(layers=4, kv_heads=2, head_dim=8, minor=_STATE8, minor_layers=(1, 3))
_MLA_STATE = ModelShape(layers=4, minor=_STATE8, minor_layers=(1, 3))
_GQA2_STATES = ModelShape(layers=6, kv_heads=2, head_dim=8, minor=replace(_STATE8, layers=6), minor_layers=(2, 5))
_LABELS = {
    _MLA: "mla", _GQA8: "gqa8", _GQA2: "gqa2", _SLIDING: "sliding", _ALL_SLIDING: "all-sliding",
    _GQA8_MLA: "gqa8+mla", _GQA2_MLA: "gqa2+mla", _MLA_GQA8: "mla+gqa8",
    _GQA8_STATE: "gqa8+state", _GQA2_STATE: "gqa2+state", _MLA_STATE: "mla+state", _GQA2_STATES: "gqa2x2+state",
}  # fmt: skip

# Out of order and partly not adjacent, different on the two sides, so that shifted or merged ranges show.
_PREFILL_BLOCKS = ((2, 3, 5, 7), (8, 10, 12, 13), (14,))
_LOOKAHEAD_BLOCKS = (3, 2)
_DECODE_BLOCKS = ((9, 4, 5, 11), (1, 6, 7, 13), (15,))
_PROMPT_TOKENS = 64

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
_GENERATE_S = 5.0
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


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario on one release. `requests` says how many, spread over the engines' DP ranks."""

    release: str
    mode: Mode
    prefill: EngineSize
    decode: EngineSize
    model: ModelShape
    router: str
    faults: tuple[str, ...] = ()
    requests: int = 1
    external_zero: bool = False
    generate_s: float = 0.0

    @property
    def id(self) -> str:
        """A name that says it all and sorts well."""
        sizes = "".join(
            f"{letter}{size.tp}" + (f"x{size.dp}" if size.dp > 1 else "")
            for letter, size in (("p", self.prefill), ("d", self.decode))
        )
        kind = (["external_zero"] if self.external_zero else []) + (["generating"] if self.generate_s else [])
        tail = "+".join([self.router.split()[0].removesuffix("-proxy").removeprefix("vllm-"), *kind, *self.faults])
        forms = [_form(size) for size in (self.prefill, self.decode)]
        caches = "caches=" + ">".join(form or "usual" for form in forms) if any(forms) else ""
        return "/".join(filter(None, (self.release, self.mode, sizes, _LABELS[self.model], caches, tail)))

    def case(self, completion_delay_s: float = 0.0) -> ConnectorCase:
        """Return what the harness runs, with transfers that take `completion_delay_s`."""
        keys = Injector([parse_fault(text) for text in self.faults])
        return ConnectorCase(
            self.mode,
            self.model,
            self.prefill,
            self.decode,
            tuple(self._request(index, keys) for index in range(self.requests)),
            prompt_tokens=_PROMPT_TOKENS,
            completion_delay_s=completion_delay_s,
        )

    def _request(self, index: int, keys: Injector) -> RequestCase:
        router = get_router(self.router, self.release)
        prefill_dp, decode_dp = index % self.prefill.dp, index % self.decode.dp
        values = {
            "transfer_id": f"tx-{index:032x}",
            "prefill.tp": self.prefill.tp,
            "prefill.dp": self.prefill.dp,
            "prefill.dp_rank": prefill_dp,
            "decode.tp": self.decode.tp,
            "decode.dp": self.decode.dp,
            "decode.dp_rank": decode_dp,
        }
        dispatch = Dispatch(router, self.mode, values, keys, index)
        return RequestCase(
            self._blocks("prefill", index),
            self._blocks("decode", index),
            dispatch.prefill_leg()[0],
            lambda response: dispatch.decode_leg(response)[0],
            prefill_dp,
            decode_dp,
            external_zero=self.external_zero,
            generate_s=self.generate_s,
        )

    def _blocks(self, side: Side, index: int) -> tuple[int, ...]:
        """The blocks of a request, table after table. Decode allocates none for what has left a window."""
        size, rows = (self.prefill, _PREFILL_BLOCKS) if side == "prefill" else (self.decode, _DECODE_BLOCKS)
        count = _PROMPT_TOKENS // size.cache.block_size
        if self.model.alike or not size.hybrid_kv:
            return rows[index][:count] + (_LOOKAHEAD_BLOCKS[:1] if size.lookahead_tokens else ())
        blocks: tuple[int, ...] = ()
        for table, layers in enumerate(self.model.tables):
            window = self.model.at(layers[0]).window
            if self.model.at(layers[0]).state:
                blocks += rows[table][:1]
                continue
            skipped = max(0, _PROMPT_TOKENS - window) // size.cache.block_size if window and side == "decode" else 0
            blocks += (0,) * skipped + rows[table][skipped:count]
            blocks += _LOOKAHEAD_BLOCKS[table : table + 1] if size.lookahead_tokens else ()
        return blocks


def _form(size: EngineSize) -> str:
    """Name what is unusual of an engine's caches."""
    pool = f"nb{size.num_blocks}" if size.num_blocks != USUAL_POOL else ""
    one_table = "" if size.hybrid_kv else "one-table"
    lookahead = f"ahead{size.lookahead_tokens}" if size.lookahead_tokens else ""
    return ".".join(filter(None, (str(size.cache), pool, one_table, lookahead)))


def cells(release: str) -> Iterator[Cell]:
    """Yield the cells of one release, each once."""
    toy = get_router("toy-proxy", release).name

    def cell(mode: Mode, p: int, d: int, model: ModelShape, router: str = toy, faults: tuple[str, ...] = ()) -> Cell:
        return Cell(release, mode, EngineSize(p), EngineSize(d), model, router, faults)

    for p, d in ((4, 4), (2, 4), (4, 2)):
        for model in (_MLA, _GQA8, _GQA2):
            yield cell("write", p, d, model)
    for p, d, faults in ((4, 4, _DROP), (4, 4, _ONE), (4, 2, _DROP), (2, 4, _DROP)):
        for model in (_MLA, _GQA8):
            yield cell("write", p, d, model, faults=faults)
    yield cell("write", 8, 8, _MLA)
    if release in ("0.26.0", "0.27.0", "0.33.0"):
        yield cell("write", 8, 8, _GQA8)
    if release in ("0.26.0", "0.27.0", "0.32.0", "0.33.0"):
        yield cell("write", 8, 4, _MLA)
        yield cell("write", 4, 8, _MLA)
    if release == "0.26.0":
        yield cell("write", 8, 8, _MLA, faults=_RENAME)
    for dp_faults in ((), _DROP):
        yield Cell(release, "write", EngineSize(1), EngineSize(1, dp=2), _MLA, toy, dp_faults, requests=2)
    for p, d in ((2, 4), (4, 2)):
        for model in (_MLA, _GQA2, _GQA8):
            yield cell("read", p, d, model)
    for model in (_MLA, _GQA8):
        yield cell("read", 4, 4, model)
    for p, d in ((4, 4), (2, 4), (4, 2)):
        yield cell("read", p, d, _MLA, router="vllm-router 0.1.17")
    for fault in _KEY_FAULTS:
        yield cell("write", 2, 2, _MLA, faults=(fault,))
    for zero, planned in _RUNNING:
        yield replace(cell("write", 2, 2, _MLA, faults=planned), external_zero=zero, generate_s=_GENERATE_S)
    for fault in _READ_KEY_FAULTS:
        yield cell("read", 2, 2, _MLA, faults=(fault,))
    for requests, group in ((1, _SWAPPED), (2, _STALE)):
        for mode, p, d, dp, fault in group:
            # Where a step reads for one request only, it does so whatever their keys.
            if mode == "write" or requests == 1 or get_release(release).read_queue == "all":
                yield Cell(release, mode, EngineSize(p, dp), EngineSize(d, dp), _MLA, toy, (fault,), requests)
    yield from _cache_cells(release, toy)
    yield from _layer_cells(release, toy)
    yield from _state_cells(release, toy)


# (prefill, decode, model) of both modes: caches that lie alike or not.
_SPLIT, _INTERLEAVED, _PACKED = CacheForm(), CacheForm(layout="interleaved"), CacheForm(layout="packed")
_HEAD_MAJOR, _MIXED = CacheForm(order="HND"), CacheForm(layout="interleaved", order="HND")
_LARGE_BLOCKS = CacheForm(block_size=32)
_BF16, _FP16, _FP8 = CacheForm(kv_dtype="bf16"), CacheForm(kv_dtype="fp16"), CacheForm(kv_dtype="fp8")
_FORMS: tuple[tuple[EngineSize, EngineSize, ModelShape], ...] = (
    *(
        (EngineSize(p, cache=form), EngineSize(d, cache=form), _GQA8)
        for form in (_INTERLEAVED, _HEAD_MAJOR, _PACKED)
        for p, d in ((2, 2), (2, 4), (4, 2))
    ),
    *(
        (EngineSize(1, cache=here), EngineSize(1, cache=there), _GQA8)
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
    (EngineSize(4, cache=_INTERLEAVED), EngineSize(2), _GQA8),
    (EngineSize(2, cache=_MIXED), EngineSize(4), _GQA8),
    *((EngineSize(1, num_blocks=24, cache=form), EngineSize(1, cache=form), _GQA8) for form in (_SPLIT, _INTERLEAVED)),
    (EngineSize(1, cache=_LARGE_BLOCKS), EngineSize(1), _MLA),
    (EngineSize(1), EngineSize(1, cache=_LARGE_BLOCKS), _MLA),
    (EngineSize(1, cache=_BF16), EngineSize(1, cache=_FP8), _MLA),
    (EngineSize(1, cache=CacheForm(layout="latent")), EngineSize(1, cache=CacheForm(layout="latent")), _MLA),
    (EngineSize(1, cache=CacheForm(layout="standard")), EngineSize(1, cache=CacheForm(layout="standard")), _MLA),
)


def _cache_cells(release: str, router: str) -> Iterator[Cell]:
    """Yield the cells of caches that lie otherwise than usual, or not alike."""
    modes: tuple[Mode, ...] = ("write", "read")
    for mode in modes:
        for prefill, decode, model in _FORMS:
            yield Cell(release, mode, prefill, decode, model, router)


def _layer_cells(release: str, router: str) -> Iterator[Cell]:
    """Yield the cells of models whose layers are not all alike."""
    record = get_release(release)
    hybrid = record.hybrid_manager == "on"

    def cell(mode: Mode, prefill: EngineSize, decode: EngineSize, model: ModelShape) -> Cell:
        sizes = [replace(size, hybrid_kv=size.hybrid_kv and hybrid) for size in (prefill, decode)]
        return Cell(release, mode, sizes[0], sizes[1], model, router)

    off = EngineSize(1, hybrid_kv=False)
    if not hybrid:  # all have one table
        for mode in _MODES:
            yield cell(mode, off, off, _SLIDING)
            for model, (p, d) in itertools.product((_GQA8_MLA, _MLA_GQA8), ((2, 4), (4, 2))):
                yield cell(mode, EngineSize(p), EngineSize(d), model)
        return
    for mode in _MODES:
        for p, d in ((1, 1), (2, 2)):
            yield cell(mode, EngineSize(p), EngineSize(d), _SLIDING)
        yield cell(mode, EngineSize(1), EngineSize(1), _ALL_SLIDING)
    yield cell("read", EngineSize(2), EngineSize(4), _ALL_SLIDING)
    yield cell("read", EngineSize(1), EngineSize(1, lookahead_tokens=1), _SLIDING)
    yield cell("read", EngineSize(1), off, _SLIDING)
    yield cell("read", off, EngineSize(1), _SLIDING)
    yield cell("read", off, EngineSize(1), _ALL_SLIDING)
    for mode in _MODES:
        yield cell(mode, off, off, _SLIDING)
    one_table = record.mixed_layers == "hybrid_off"
    for model in (_GQA8_MLA, _GQA2_MLA, _MLA_GQA8):
        for mode in _MODES:
            for p, d in ((2, 2), (2, 4), (4, 2)):
                yield cell(mode, EngineSize(p, hybrid_kv=not one_table), EngineSize(d, hybrid_kv=not one_table), model)
            if one_table:
                yield cell(mode, EngineSize(2), EngineSize(2), model)


# On releases that start a model with recurrent states: mode, TP sizes, model, faults.
_STATES: tuple[tuple[Mode, int, int, ModelShape, tuple[str, ...]], ...] = (
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


def _state_cells(release: str, router: str) -> Iterator[Cell]:
    """Yield the cells of models with recurrent states; before 0.31 they don't start."""
    if get_release(release).states == "refused":
        for mode in _MODES:
            yield Cell(release, mode, EngineSize(1), EngineSize(1), _GQA8_STATE, router)
        return
    for mode, p, d, model, faults in _STATES:
        starts = mode == "read" or get_release(release).states == "read_write"
        if starts or (p, d, model, faults) == (2, 2, _GQA8_STATE, ()):
            yield Cell(release, mode, EngineSize(p), EngineSize(d), model, router, faults)
