"""What lies in the memory of a decode DP rank, of all groups of layers, and what its ranks need there.

Each group has memory of its own here. On an engine, layers of unequal block tables share tensors; as their block ids
never meet, that shows only in what a block held before it was theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcover.sim.cache.layers import Group
from kvcover.sim.cache.ledger import Codes, Copy, Count, Ledger, Need, cell_copy, cell_index, code_of

Needs = tuple[Need, ...]


def needs_of(groups: Sequence[Group], tables: Sequence[Codes], contents: Sequence[Codes], rank: int, tp: int) -> Needs:
    """What decode rank `rank` of `tp` needs of a request, by group; `contents` says by table what its blocks should hold."""
    needs = []
    for group in groups:
        wanted = contents[group.table]
        blocks = tables[group.table][: len(wanted)]
        used = np.flatnonzero(blocks)
        where, codes = [], []
        for slot, head in enumerate(group.geometry.heads_of(rank, tp)):
            for plane in range(group.geometry.planes):
                where.append(cell_index(group.shape, plane, blocks[used], slot))
                codes.append(code_of(group.geometry, wanted[used], plane, head))
        needs.append(Need(np.concatenate(where), np.concatenate(codes)))
    return tuple(needs)


class Memory:
    """What lies in the memory of a decode DP rank, of all groups: each a `Ledger`, asked by the model's layer numbers."""

    def __init__(self, groups: Sequence[Group], places: Sequence[tuple[int, int]], tp: int) -> None:
        self.groups = groups
        self.ledgers = [Ledger(group.geometry, group.shape, tp) for group in groups]
        self._places = places
        self._at = [(self.ledgers[group], place) for group, place in places]

    def admit(self, region: int, tables: Sequence[Codes]) -> None:
        """The request `region` owns these blocks from now on."""
        for group, ledger in zip(self.groups, self.ledgers, strict=True):
            blocks = tables[group.table]
            ledger.admit(region, blocks[blocks > 0])

    def fill(self, rank: int, tp: int, region: int, contents: Codes, tables: Sequence[Codes]) -> None:
        """The first token blocks of a request hold what rank `rank` of `tp` needs there already. A state is never kept."""
        for group, ledger in zip(self.groups, self.ledgers, strict=True):
            if group.geometry.state:
                continue
            blocks, heads = tables[group.table][: len(contents)], group.geometry.heads_of(rank, tp)
            used = np.flatnonzero(blocks)
            copy = cell_copy(group.geometry, group.shape, contents[used], blocks[used], heads.start, 0, len(heads))
            for layer in range(group.geometry.layers):
                ledger.land(rank, layer, region, copy)

    def land(self, rank: int, layer: int, region: int, copy: Copy) -> None:
        """A batch of whole cells landed in the blocks of its own request."""
        ledger, place = self._at[layer]
        ledger.land(rank, place, region, copy)

    def land_astray(self, rank: int, layer: int, copy: Copy, home: int | None) -> int:
        """A batch that may hit any block. Returns how many cells it changed outside region `home`."""
        ledger, place = self._at[layer]
        return ledger.land_astray(rank, place, copy, home)

    def count(self, rank: int, layer: int, region: int, needs: Needs) -> Count:
        """How much of `needs` the region holds in this rank and layer."""
        group, place = self._places[layer]
        return self.ledgers[group].count(rank, place, region, needs[group])

    def count_each(self, rank: int, region: int, needs: Needs) -> list[Count]:
        """`count` of each layer of a rank, in order."""
        counts = [ledger.count_each(rank, region, need) for ledger, need in zip(self.ledgers, needs, strict=True)]
        return [counts[group][place] for group, place in self._places]

    def count_all(self, rank: int, region: int, needs: Needs) -> Count:
        """`count` over all layers of a rank."""
        counts = [ledger.count_all(rank, region, need) for ledger, need in zip(self.ledgers, needs, strict=True)]
        return counts[0] if len(counts) == 1 else sum(counts[1:], counts[0])
