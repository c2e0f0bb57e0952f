"""What a connector run is given and what it reports: plain data, no vLLM, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvcover.faults import KINDS, EventFault, Fault, parse_fault
from kvcover.sim.cache.geometry import block_tables

Mode = Literal["write", "read"]
Side = Literal["prefill", "decode"]
USUAL_BLOCK_SIZE = 16
USUAL_POOL = 16
Leg = dict[str, Any]
DecodeLeg = Leg | Callable[[Mapping[str, Any]], Leg]
"""A leg, or what the router makes of prefill's response when the legs are serial (READ)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The KV geometry of a model. `kv_heads` 0 means MLA with `latent + rope` values a token.

    A layer attends to the last `window` tokens (0: to all); the layers `minor_layers` are as `minor` says. A `state` layer
    keeps no tokens but a recurrent state of `kv_heads` heads, `head_dim` values each of convolution and of the rest.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 8
    latent: int = 64
    rope: int = 16
    window: int = 0
    state: bool = False
    minor: ModelShape | None = None
    minor_layers: tuple[int, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether all layers are alike, and attend to all tokens."""
        return not self.window and self.minor is None

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block table, as vLLM's hybrid KV cache manager makes them."""
        return block_tables([(self.at(layer).window, self.at(layer).state) for layer in range(self.layers)])

    @property
    def state_tables(self) -> tuple[bool, ...]:
        """For each block table, whether its layers keep a state: a request has one block in it."""
        return tuple(self.at(layers[0]).state for layers in self.tables)

    @property
    def table_of(self) -> tuple[int, ...]:
        """The block table of each layer."""
        return tuple(next(t for t, layers in enumerate(self.tables) if layer in layers) for layer in range(self.layers))

    def at(self, layer: int) -> ModelShape:
        """What this layer is like."""
        return self.minor if self.minor is not None and layer in self.minor_layers else self

    @property
    def mla(self) -> bool:
        """Whether every rank holds one whole latent instead of a share of the heads."""
        return self.kv_heads == 0

    @property
    def heads(self) -> int:
        """Heads that the coverage rule counts: an MLA latent is one head."""
        return 1 if self.mla else self.kv_heads

    @property
    def room(self) -> tuple[int, int, int]:
        """Planes, heads and width that hold those of every layer."""
        kinds = (self, self.minor) if self.minor is not None else (self,)
        return max(k.planes for k in kinds), max(k.heads for k in kinds), max(k.width for k in kinds)

    @property
    def planes(self) -> int:
        """2 for K and V, 1 for a latent."""
        return 1 if self.mla else 2

    @property
    def width(self) -> int:
        """Values a token and head in one plane."""
        return self.latent + self.rope if self.mla else self.head_dim

    def owned_heads(self, tp_rank: int, tp_size: int) -> range:
        """Return the global heads that TP rank `tp_rank` of `tp_size` holds."""
        if self.mla:
            return range(1)
        if tp_size <= self.kv_heads:
            share = self.kv_heads // tp_size
            return range(tp_rank * share, (tp_rank + 1) * share)
        head = tp_rank * self.kv_heads // tp_size
        return range(head, head + 1)

    def __str__(self) -> str:
        own = self._own
        if self.minor is None:
            return f"layers={self.layers},{own}"
        kind = "full" if self.window else "state" if self.minor.state else "mla" if self.minor.mla else "gqa"
        other = "" if self.window else f",{self.minor._own}"
        return f"layers={self.layers},{own}{other},{kind}_every={self.minor_layers[0] + 1}"

    @property
    def _own(self) -> str:
        if self.mla:
            return f"mla={self.latent}+{self.rope}"
        if self.state:
            return f"state={self.kv_heads}x{self.head_dim}"
        return f"kv_heads={self.kv_heads},head_dim={self.head_dim}" + (f",window={self.window}" if self.window else "")


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How an engine's caches lie in memory: names as in a scenario's `prefill` and `decode`; None: as the release has it.

    `kv_dtype` None: the dtype of the other side, of which nothing depends.
    """

    block_size: int = USUAL_BLOCK_SIZE
    layout: str | None = None
    order: str | None = None
    kv_dtype: str | None = None

    def __str__(self) -> str:
        size = f"bs{self.block_size}" if self.block_size != USUAL_BLOCK_SIZE else ""
        return ".".join(filter(None, (self.layout, self.order, size, self.kv_dtype)))


@dataclass(frozen=True, slots=True)
class EngineSize:
    """How wide an engine is, how many KV blocks each of its ranks has, and their form."""

    tp: int
    dp: int = 1
    num_blocks: int = USUAL_POOL
    cache: CacheForm = CacheForm()
    hybrid_kv: bool = True
    """Whether layers that look back unequally far have block tables of their own (vLLM's hybrid KV cache manager)."""
    lookahead_tokens: int = 0

    def rank_name(self, side: Side, dp: int, tp: int) -> str:
        """Name a rank as results do: `D3`, or `D1.3` when the engine has several DP ranks."""
        letter = "P" if side == "prefill" else "D"
        return f"{letter}{tp}" if self.dp == 1 else f"{letter}{dp}.{tp}"


@dataclass(frozen=True, slots=True)
class RequestCase:
    """One request: where its two legs go, the blocks it gets there and the two legs as they leave the router.

    The blocks of several tables stand one table after another; 0 is vLLM's null block, for what has left a window.
    """

    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]
    prefill_leg: Leg
    decode_leg: DecodeLeg
    prefill_dp: int = 0
    decode_dp: int = 0
    prompt_tokens: int | None = None
    """Whole blocks of tokens; None: as the case says."""
    external_zero: bool = False
    """Decode's scheduler wants nothing from outside, whatever the connector answers."""
    generate_s: float = 0.0
    """How long it goes on at decode after its first token."""
    arrival_s: float = 0.0
    """When the router gets it, from the start of the run."""
    ports_off: Mapping[str, int] = field(default_factory=dict)
    """By how much the ports of a side are off in the request's id."""

    def blocks(self, side: Side) -> tuple[int, ...]:
        """Return its blocks on one of the two engines."""
        return self.prefill_blocks if side == "prefill" else self.decode_blocks

    def tables(self, side: Side, states: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
        """Return its blocks by block table; `states` says of each whether it is one of recurrent states, with one block."""
        blocks = iter(self.blocks(side))
        each = max(0, len(self.blocks(side)) - sum(states)) // (len(states) - sum(states))
        return tuple(tuple(itertools.islice(blocks, 1 if state else each)) for state in states)

    def placement(self) -> dict[str, Any]:
        """Return where it goes, in the fields of a scenario's request."""
        fields: dict[str, Any] = {
            "prefill_dp": self.prefill_dp,
            "decode_dp": self.decode_dp,
            "prefill_blocks": [block for block in self.prefill_blocks if block],
            "decode_blocks": [block for block in self.decode_blocks if block],
        }
        if self.external_zero:
            fields["external_zero"] = True
        if self.generate_s:
            fields["generate_ns"] = round(self.generate_s * 1e9)
        return fields


@dataclass(frozen=True, slots=True)
class Timers:
    """The connector's own limits in seconds, small so that a hang is decided soon. None: scaled with the number of ranks."""

    transfer_s: float | None = None
    defer_s: float | None = None
    read_abort_s: float = 2.0
    load: int = 0
    """Ranks that share the machine in all, if other runs go on at the same time."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Planned faults, in order, and the file in which all processes of a run count what they did."""

    faults: tuple[Fault, ...] = ()
    book: Path | None = None

    @property
    def events(self) -> tuple[EventFault, ...]:
        """Those that act while the run goes on; the others act on what the router writes."""
        return tuple(fault for fault in self.faults if isinstance(fault, EventFault) and KINDS[fault.kind].point != "registration")

    def __reduce__(self) -> tuple[Any, ...]:
        # Faults tell a default by its identity, which a pickle loses, so they travel as people write them.
        return _plan_from_text, (tuple(str(fault) for fault in self.faults), self.book)


def _plan_from_text(texts: tuple[str, ...], book: Path | None) -> FaultPlan:
    return FaultPlan(tuple(parse_fault(text) for text in texts), book)


@dataclass(frozen=True, slots=True)
class ConnectorCase:
    """One run of two engines. All sizes are in tokens, blocks and ranks; prompts are whole blocks."""

    mode: Mode
    model: ModelShape
    prefill: EngineSize
    decode: EngineSize
    requests: tuple[RequestCase, ...]
    prompt_tokens: int = 64
    timers: Timers = field(default_factory=Timers)
    completion_delay_s: float = 0.0
    """Time from the post of a transfer to its bytes and completion; 0: both happen inside the post."""
    plan: FaultPlan = field(default_factory=FaultPlan)
    log_level: str = "WARNING"

    def for_ranks(self, book: Path) -> ConnectorCase:
        """Return what the ranks' processes get: without the legs, which only the router has."""
        bare = tuple(replace(request, prefill_leg={}, decode_leg={}) for request in self.requests)
        return replace(self, requests=bare, plan=replace(self.plan, book=book))

    def tokens(self, request: int) -> int:
        """Return the prompt tokens of a request."""
        return self.requests[request].prompt_tokens or self.prompt_tokens

    def tables(self, side: Side) -> tuple[bool, ...]:
        """Return the block tables that a request has on an engine: whether each is one of recurrent states."""
        return self.model.state_tables if self._by_table(side) else (False,)

    def table_of(self, side: Side) -> tuple[int, ...]:
        """Return the block table of each layer."""
        return self.model.table_of if self._by_table(side) else (0,) * self.model.layers

    def _by_table(self, side: Side) -> bool:
        """Whether layers that are not alike have block tables of their own; with recurrent states no engine starts without."""
        return self.engine(side).hybrid_kv or any(self.model.state_tables)

    @property
    def ranks(self) -> int:
        """Worker processes of both engines."""
        return self.prefill.tp * self.prefill.dp + self.decode.tp * self.decode.dp

    @property
    def transfer_timeout_s(self) -> float:
        """A healthy handshake must fit in it even when all ranks share two cores."""
        return self.timers.transfer_s or 1.0 + 0.08 * max(self.ranks, self.timers.load)

    @property
    def defer_timeout_s(self) -> float:
        """How long prefill keeps blocks that nobody asks for."""
        return self.timers.defer_s or 1.5 + 0.08 * max(self.ranks, self.timers.load)

    def engine(self, side: Side) -> EngineSize:
        """Return the size of one of the two engines."""
        return self.prefill if side == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Coverage:
    """Fractions of one rank's cells: right, wrong, never written; sum 1. `stray` counts cells outside the request."""

    covered: float
    wrong: float
    missing: float
    stray: int = 0

    @classmethod
    def over(cls, parts: Sequence[tuple[int, Coverage]]) -> Coverage:
        """Return the coverage of several parts, each with its number of cells."""
        if len(parts) == 1:
            return parts[0][1]
        total = max(1, sum(cells for cells, _ in parts))

        def share(name: str) -> float:
            found: int = sum(round(getattr(part, name) * cells) for cells, part in parts)
            return found / total

        return cls(share("covered"), share("wrong"), share("missing"), sum(part.stray for _, part in parts))


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that left a call on the connector, or ended one of its threads.

    `misfit` is the harness's own line that failed, if no line of the connector was running: then it can't drive this vLLM.
    `broken` is the error, by itself or as the cause of this one, that says the code or the machine is broken: it is no fault
    of the protocol.
    """

    rank: str
    call: str
    kind: str
    text: str
    misfit: str = ""
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Forward:
    """The part of a step that is a forward pass: requests whose prompt is computed, or whose loaded cells are used.

    `fill` says how many tokens of each prompt are computed: a recurrent state is one of so many tokens.
    """

    fill: Mapping[int, int] = field(default_factory=dict)
    use: tuple[int, ...] = ()


@dataclass(slots=True)
class StepReport:
    """What a worker returns from a step. Request ids are the engine's; `raised` is set if the step died."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    raised: Raised | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker saw. `notices` are the control messages that its notify listener took in, in order.

    `wrote_to` maps a peer's engine key to the ranges (address there, bytes) that were written without an error,
    `read_from` to the number of bytes that were read, in so many `reads`.
    """

    name: str
    notices: tuple[dict[str, Any], ...] = ()
    wrote_to: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    read_from: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    failed_batches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bound: tuple[int, ...] = ()
    dialled: tuple[int, ...] = ()
    last_step: str = ""
    """What it did last, or where it stands if it never came back."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request ended. Coverage is by decode TP rank of the request's DP rank."""

    at_go: tuple[Coverage, ...] | None
    at_end: tuple[Coverage, ...]
    outcome: str
    go: bool = False
    failed: bool = False
    recomputed: bool = False
    told: tuple[str, ...] = ()
    prefill_told: tuple[str, ...] = ()
    prefill_released: tuple[str, ...] = ()
    released_late: bool = False
    """A timer fired: a prefill rank gave its blocks back without a message, or its forward waited for a peer in vain."""
    ended: bool = False
    held: bool = False
    """An engine still holds the request's blocks at the end."""

    @property
    def coverage(self) -> tuple[Coverage, ...]:
        """At go, or at the end when the request never went."""
        return self.at_go if self.at_go is not None else self.at_end


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One run: every request, every rank, every exception."""

    requests: tuple[RequestResult, ...]
    ranks: tuple[RankReport, ...]
    raised: tuple[Raised, ...]
    stalled: tuple[str, ...]
    """Ranks that never came back from a step."""
    outcome: str
    seconds: float
    fired: tuple[int, ...] = ()
    """How often each planned fault changed something."""
    stray: int | None = None
