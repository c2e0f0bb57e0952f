"""The KV cache of one model: which cells exist, which rank holds which head, how a cache lies in memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcover.sim.errors import PeerRefusal

Units = NDArray[np.int64]


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV cache of a model looks like, independent of sharding.

    `layers` attention layers; `kv_heads` heads of `head_dim` elements for K and for V, or, when `mla` is true, one
    latent vector of `head_dim` elements (compressed KV and rotary part together) that every rank needs whole.
    A layer attends to the last `window` tokens (0: to all). Where layers are not all alike, the layers `minor_layers`
    are as `minor` says, and the rest of this struct is the kind that the model as a whole passes for.

    A `state` layer (Mamba, KDA, linear attention) keeps no tokens: a request has one block in it, of `kv_heads` heads of the
    recurrent state. Its two planes are the convolution's part and the rest, as if both had `head_dim` elements a head.
    """

    layers: int
    kv_heads: int
    head_dim: int
    mla: bool = False
    window: int = 0
    state: bool = False
    minor: Geometry | None = None
    minor_layers: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[Geometry, ...]:
        """All that its layers are like."""
        return (self,) if self.minor is None else (self, self.minor)

    def splits(self, tp: int) -> bool:
        """Whether `tp` ranks can share the heads."""
        return self.mla or self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and not self.state)

    def at(self, layer: int) -> Geometry:
        """What this layer is like."""
        return self.minor if self.minor is not None and layer in self.minor_layers else self

    def first(self, layers: int) -> Geometry:
        """The same model with its first `layers` layers only, each as it was."""
        kept = tuple(layer for layer in self.minor_layers if layer < layers)
        minor = None if self.minor is None else self.minor.first(layers)
        return msgspec.structs.replace(self, layers=layers, minor=minor, minor_layers=kept)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer."""
        return tuple(self.at(layer).window for layer in range(self.layers))

    @property
    def sorts(self) -> tuple[Hashable, ...]:
        """What vLLM sorts each layer by when it makes block tables."""
        return tuple((kind.window, kind.state) for kind in map(self.at, range(self.layers)))

    @property
    def has_states(self) -> bool:
        """Whether some of its layers keep a recurrent state instead of tokens."""
        return any(kind.state for kind in self.kinds)

    @property
    def mixed(self) -> bool:
        """Whether layers with tokens differ in what a block of them holds, and not only in how far they look back."""
        minor = self.minor
        unlike = minor is not None and (minor.mla, minor.kv_heads, minor.head_dim) != (self.mla, self.kv_heads, self.head_dim)
        return unlike and not self.has_states

    @property
    def planes(self) -> int:
        """K and V are two planes; an MLA latent is one."""
        return 1 if self.mla else 2

    def heads_of(self, rank: int, tp: int) -> range:
        """Global heads that TP rank `rank` of `tp` holds (vLLM's sharding; replicated when tp > heads).

        Raises PeerRefusal when vLLM itself would not start with that split.
        """
        heads = self.kv_heads
        if self.mla:
            return range(1)
        if tp <= heads:
            if heads % tp:
                raise PeerRefusal("ValueError", f"{heads} KV heads can't be split over tensor parallel size {tp}")
            per_rank = heads // tp
            return range(rank * per_rank, (rank + 1) * per_rank)
        if self.state:
            raise PeerRefusal("ValueError", f"{heads} heads of a state can't be split over tensor parallel size {tp}")
        if tp % heads:
            raise PeerRefusal("ValueError", f"{heads} KV heads can't be replicated over tensor parallel size {tp}")
        head = rank * heads // tp
        return range(head, head + 1)

    def heads_per_rank(self, tp: int) -> int:
        return 1 if self.mla else max(1, self.kv_heads // tp)


def block_tables(sorts: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The layers of each block table, when layer i is of the sort `sorts[i]`: its window, and whether it keeps a state.

    vLLM's hybrid KV cache manager gives layers of unequal sort unequal tables, of equally many layers each: as many as
    the rarer sort has, or as the other one if that is less than 1.5 times as many (vLLM's kv_cache_utils.py, the same in
    0.24-0.33 for two sorts). Layers of a sort are dealt out to its tables in turn.
    """
    kinds: dict[Hashable, list[int]] = {}
    for layer, sort in enumerate(sorts):
        kinds.setdefault(sort, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    tables = []
    for layers in kinds.values():
        count = -(-len(layers) // size)
        tables += [tuple(layers[first::count]) for first in range(count)]
    return tuple(tables)


# The axes of a contiguous cache from the slowest to the fastest: plane, block, token, head. A head's elements come last.
AXES = {
    ("split", "NHD"): "pbth",
    ("split", "HND"): "pbht",
    ("interleaved", "NHD"): "bpth",
    ("interleaved", "HND"): "bpht",
    ("packed", "HND"): "bhtp",
    ("standard", "HND"): "bhtp",
    ("latent", "NHD"): "bt",
}


class CacheShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One rank's cache of one layer: what it holds, and how that lies in memory.

    A *cell* is one (plane, block, head), a *unit* one (plane, block, token, head), which is `head_bytes` bytes. Units are
    numbered in the order `[plane, block, token, head]` whatever the memory's order is; `memory` has the latter. Blocks that
    a peer addresses with other strides than ours fall on units, not on cells.

    `layout` and `order` are named in `kvcover.sim.scenario.scenario.Side`.
    """

    planes: int
    num_blocks: int
    block_size: int
    heads: int
    head_bytes: int
    layout: str = "split"
    order: str = "NHD"
    kv_dtype: str = "bf16"

    @property
    def cells(self) -> int:
        return self.planes * self.num_blocks * self.heads

    @property
    def block_units(self) -> int:
        """Units of one block of one plane."""
        return self.block_size * self.heads

    @property
    def units(self) -> int:
        return self.planes * self.num_blocks * self.block_units

    @cached_property
    def memory(self) -> str:
        """The axes in memory, slowest first, without those of length 1 (blocks always count)."""
        sizes = self._sizes
        return "".join(axis for axis in AXES[self.layout, self.order] if axis == "b" or sizes[axis] > 1)

    @cached_property
    def taken_for(self) -> CacheShape:
        """The shape that the connector takes this for: it goes by the lengths of the axes.

        Two blocks interleaved look like two planes split, and as many heads as tokens look token-major (0.24+).
        """
        layout = "split" if self.layout == "interleaved" and self.num_blocks == 2 else self.layout
        order = "NHD" if self.layout in ("split", "interleaved") and self.heads == self.block_size else self.order
        return msgspec.structs.replace(self, layout=layout, order=order)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Units from one plane, block, token or head to the next."""
        strides, step = dict.fromkeys("pbth", 0), 1
        for axis in reversed(AXES[self.layout, self.order]):
            strides[axis] = step
            step *= self._sizes[axis]
        return strides

    @cached_property
    def advertised(self) -> tuple[int, ...]:
        """What 0.33 tells its peers of a K/V cache, in bytes: whole blocks are copied only between equal ones."""
        taken = self.taken_for
        strides = [taken.strides[axis] * self.head_bytes for axis in ("b", "h", "t", "p")]
        return self.heads, self.block_size, taken.content_bytes, *strides

    @property
    def apart(self) -> int:
        """Planes that lie apart: K and V packed into one content do not."""
        return 1 if self.layout in ("packed", "standard") else self.planes

    @property
    def content_bytes(self) -> int:
        """Bytes of a (token, head) that lie together: of K and V, or of one of them."""
        return self.head_bytes * (self.planes // self.apart)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {"p": self.planes, "b": self.num_blocks, "t": self.block_size, "h": self.heads}

    def same_blocks(self, other: CacheShape) -> bool:
        """Whether a block of one is a block of the other, byte for byte; pools may differ in size."""
        return (
            self.memory == other.memory
            and (self.block_size, self.heads, self.head_bytes) == (other.block_size, other.heads, other.head_bytes)
            and self.kv_dtype == other.kv_dtype
        )

    def unit_at(self, place: Units) -> Units:
        """The unit that lies at each place of the memory, both counted in units."""
        axes = AXES[self.layout, self.order]
        if axes == "pbth":
            return place
        sizes = self._sizes
        at = dict.fromkeys("pbth", np.zeros_like(place))
        at |= dict(zip(axes, np.unravel_index(place, [sizes[axis] for axis in axes]), strict=True))
        unit: Units = ((at["p"] * self.num_blocks + at["b"]) * self.block_size + at["t"]) * self.heads + at["h"]
        return unit


def check_slices(mine: CacheShape, theirs: CacheShape) -> None:
    """Heads can only be moved one by one between caches of equal blocks and contents (0.33.0)."""
    for what, here, there in (
        ("tokens a block", mine.block_size, theirs.block_size),
        ("bytes a head", mine.content_bytes, theirs.content_bytes),
        ("planes apart", mine.apart, theirs.apart),
    ):
        if here != there:
            raise PeerRefusal("ValueError", f"{here} {what} here, {there} at the peer")
