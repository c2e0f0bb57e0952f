"""Models whose layers are not all alike: which layers share a block table, and which blocks of it an engine allocates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvcover.sim.cache.geometry import CacheShape, Geometry, Units, block_tables


class Group(msgspec.Struct, frozen=True):
    """Layers that are alike: `geometry` of these alone, `shape` of one of them on one rank, the `table` they use."""

    geometry: Geometry
    layers: tuple[int, ...]
    table: int
    shape: CacheShape


class Table(msgspec.Struct, frozen=True):
    """A block table of one engine, as long as the prompt; 0 stands for blocks that have left the window."""

    window: int
    state: bool = False
    """Whether its layers keep a recurrent state, and a request has one block in it, however long its prompt is."""

    def kept(self, block_size: int) -> int | None:
        """How many of its last blocks are exchanged (None: all): the window's, and one as it may begin inside a block."""
        return -(-self.window // block_size) + 1 if self.window else None

    def skipped(self, tokens: int, block_size: int) -> int:
        """Leading blocks that decode does not allocate, when it computes the last of `tokens` tokens by itself.

        vLLM's SlidingWindowManager, the same in 0.30-0.33: of the tokens loaded all but `window - 1` are skipped.
        """
        return max(0, tokens - self.window) // block_size if self.window else 0

    def contents(self, tokens: Units, state: Units) -> Units:
        """What the blocks of a request hold: its `tokens`, or its `state`."""
        return state if self.state else tokens


def tables_of(geometry: Geometry, hybrid: bool) -> tuple[Table, ...]:
    """The block tables of an engine, with or without vLLM's hybrid KV cache manager (off: one table, no windows)."""
    if not hybrid or geometry.minor is None:
        return (Table(geometry.window if hybrid else 0),)
    kinds = (geometry.at(layers[0]) for layers in block_tables(geometry.sorts))
    return tuple(Table(kind.window, kind.state) for kind in kinds)


def groups_of(geometry: Geometry, hybrid: bool, shape_of: Callable[[Geometry], CacheShape]) -> tuple[Group, ...]:
    """The groups of an engine, in the order of their first layers within their tables; `shape_of` a kind of layer."""
    every = (tuple(range(geometry.layers)),)
    if geometry.minor is None:
        return (Group(_bare(geometry), every[0], 0, shape_of(geometry)),)
    groups = []
    for table, layers in enumerate(block_tables(geometry.sorts) if hybrid else every):
        kinds: dict[Geometry, list[int]] = {}
        for layer in layers:
            kinds.setdefault(_bare(geometry.at(layer)), []).append(layer)
        for kind, alike in kinds.items():
            groups.append(Group(msgspec.structs.replace(kind, layers=len(alike)), tuple(alike), table, shape_of(kind)))
    return tuple(groups)


def _bare(kind: Geometry) -> Geometry:
    """A kind of layer by what a block of it holds."""
    return msgspec.structs.replace(kind, window=0, minor=None, minor_layers=())


def places_of(groups: Sequence[Group]) -> tuple[tuple[int, int], ...]:
    """For each layer its group, and its number in there."""
    found = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    return tuple(found[layer] for layer in range(len(found)))
