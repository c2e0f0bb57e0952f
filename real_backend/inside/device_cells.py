"""Cells in device memory: filled and compared where they are, with torch, on a GPU or on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from kvcover.real_backend.inside.cells import Cells, by_cell
from kvcover.sim.cache.ledger import Count

_WIDE, _PRODUCTS = 4096, 8


class DeviceCells(Cells):
    """As `Cells`, but a view is an int32 tensor; nothing of a cache is ever copied to the host but counts,
    and what wrong cells hold."""

    __slots__ = ()

    def view(self, cache: Any) -> Any:
        sizes, order = self.memory()
        return cache.view(sizes).permute(order)

    def fill(self, view: Any, layer: int, request: int, table: Sequence[int], tokens: range) -> None:
        """Write as a forward pass does: on a GPU it is only launched when this returns, behind the layer's other work."""
        torch: Any = importlib.import_module("torch")
        where = self.rows(tokens)
        blocks = torch.tensor([table[position] for position, _ in where], device=view.device)
        needed = self._needed(view, layer, request, range(where[0][0], where[-1][0] + 1))
        if view.is_cuda:
            _compute(view.device)
        mine = torch.zeros((len(where), self.group.shape.block_size), dtype=torch.bool)
        for number, (_, rows) in enumerate(where):
            mine[number, rows] = True
        mine = mine.to(view.device)[None, :, :, None, None]
        view.index_copy_(1, blocks, torch.where(mine, needed, view.index_select(1, blocks)))

    def _grade_layer(self, layer: int, view: Any, request: int, blocks: Collection[int], first: int) -> Count:
        if not blocks:
            return Count(0, 0, 0)
        cells = view[:, list(blocks)]
        needed = self._needed(view, layer, request, range(len(blocks)))
        asked = needed != 0
        right = ((cells == needed) | ~asked).all(dim=4).all(dim=2)
        covered, wrong = int(right.sum()), int((by_cell((cells != 0) & asked) & ~right).sum())
        return Count(covered, wrong, int(right.numel()) - covered - wrong)

    def on_host(self, view: Any, blocks: Collection[int]) -> Any:
        return view[:, list(blocks)].cpu().numpy()

    def _needed(self, view: Any, layer: int, request: int, blocks: range) -> Any:
        """Return what these blocks of a request should hold in one layer, on the device of `view`."""
        torch: Any = importlib.import_module("torch")
        shape = self.group.shape
        needed = np.empty((shape.planes, len(blocks), shape.block_size, len(self.heads), self.tags), dtype=np.int32)
        for number, block in enumerate(blocks):
            for plane in range(shape.planes):
                for slot, head in enumerate(self.heads):
                    needed[plane, number, :, slot, :] = self.identity(request, block, (layer, plane, head))
        return torch.from_numpy(needed).to(view.device)


def _compute(device: Any) -> None:
    """Launch what stands for a layer's arithmetic: some ten milliseconds of an idle GPU, much longer than its launch."""
    torch: Any = importlib.import_module("torch")
    factors = torch.ones((_WIDE, _WIDE), device=device)
    for _ in range(_PRODUCTS):
        factors @ factors
