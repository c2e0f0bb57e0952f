"""The KV cache of one model: which cells exist, which rank holds which head, how a block lies in memory."""

from __future__ import annotations

import msgspec

from sim.errors import PeerRefusal


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV cache of a model looks like, independent of sharding.

    `layers` attention layers; `kv_heads` heads of `head_dim` elements for K and for V, or, when `mla` is true, one
    latent vector of `head_dim` elements (compressed KV and rotary part together) that every rank needs whole.
    """

    layers: int
    kv_heads: int
    head_dim: int
    mla: bool = False
    element_bytes: int = 2

    @property
    def planes(self) -> int:
        """K and V are two planes; an MLA latent is one."""
        return 1 if self.mla else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head (or latent) of one token in one plane."""
        return self.head_dim * self.element_bytes

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
        if tp % heads:
            raise PeerRefusal("ValueError", f"{heads} KV heads can't be replicated over tensor parallel size {tp}")
        head = rank * heads // tp
        return range(head, head + 1)

    def heads_per_rank(self, tp: int) -> int:
        return 1 if self.mla else max(1, self.kv_heads // tp)


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's cache of one layer: `[planes, num_blocks, block_size, heads, head]`, the split token-major layout.

    Two ways to address it: a *cell* is one (plane, block, head), a *unit* one (plane, block, token, head), which is
    `head_bytes` bytes. Blocks that a peer addresses with other strides than ours fall on units, not on cells.
    """

    planes: int
    num_blocks: int
    block_size: int
    heads: int
    head_bytes: int

    @property
    def cells(self) -> int:
        return self.planes * self.num_blocks * self.heads

    @property
    def block_units(self) -> int:
        """Units of one block of one plane: what the connector calls block length, in head_bytes."""
        return self.block_size * self.heads

    @property
    def units(self) -> int:
        return self.planes * self.num_blocks * self.block_units

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.planes * self.block_units * self.head_bytes
