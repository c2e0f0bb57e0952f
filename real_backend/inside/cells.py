"""Cells: what a model runner would have computed, as values that say where they belong, and how they are compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcover.real_backend.driver.case import Coverage, ModelShape

View = npt.NDArray[np.int32]
"""One layer of a rank's cache, shape [planes, blocks, block_size, heads, width], whatever its order in memory."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one rank in layers that are alike, of which it holds the global `heads`.

    Prompts are whole blocks of `block_size` tokens. `axes` names the axes in memory as `AXES` of `kvcover.sim.cache.geometry`
    does. A (token, head) takes up `width` tags of 4 bytes. With `foreign_dtype` no tag that the peer writes is what is
    needed. `layers` are the numbers of those layers, and `room` the planes, heads and width that hold those of every layer
    of the model (None: these are all its layers).
    """

    model: ModelShape
    block_size: int
    prompt_tokens: int
    heads: range
    axes: str = "pbth"
    width: int = 0
    foreign_dtype: bool = False
    layers: tuple[int, ...] | None = None
    room: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", self.width or self.model.width)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of its layers in the model."""
        return range(self.model.layers) if self.layers is None else self.layers

    def cells(self, blocks: int) -> int:
        """Return how many cells so many blocks have in all its layers."""
        return len(self.numbers) * self.model.planes * len(self.heads) * blocks

    def memory(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Return the lengths of a cache's axes in memory, tags last, and where in `View` its axes come from."""
        axes = self.axes + "".join(axis for axis in "ph" if axis not in self.axes)
        sizes = {"p": self.model.planes, "b": num_blocks, "t": self.block_size, "h": len(self.heads)}
        return [*(sizes[axis] for axis in axes), self.width], [*(axes.index(axis) for axis in "pbth"), 4]

    def view(self, cache: View, num_blocks: int) -> View:
        """Return a layer's cache in the shape of `View` without a copy."""
        sizes, order = self.memory(num_blocks)
        return cache.reshape(sizes).transpose(order)

    @property
    def values_a_request(self) -> int:
        """Numbers that one request's content takes up."""
        planes, heads, width = self.room or self.model.room
        return self.prompt_tokens * self.model.layers * planes * heads * width

    def identity(self, request: int, block: int, place: tuple[int, int, int]) -> View:
        """Return the content of one cell, [block_size, width]: numbers never used elsewhere in the run, never 0.

        `block` counts the request's blocks from 0; `place` is (layer, plane, global head). Raises ValueError if 31 bits
        can't number every value.
        """
        planes, heads, width = self.room or self.model.room
        layer, plane, head = place
        if (request + 1) * self.values_a_request >= 2**31:
            raise ValueError("too many values for 31-bit tags: use fewer layers, heads or tokens")
        first = block * self.block_size
        tokens = np.arange(first, first + self.block_size, dtype=np.int64)[:, None]
        slot = ((tokens * self.model.layers + layer) * planes + plane) * heads + head
        tags = request * self.values_a_request + slot * width + np.arange(self.width, dtype=np.int64) + 1
        return (-tags if self.foreign_dtype else tags).astype(np.int32)

    def fill(self, view: View, layer: int, request: int, blocks: Collection[int], first: int = 0) -> None:
        """Write one layer of a request's prompt, from its block `first` on, into its `blocks`."""
        for position, block in enumerate(blocks, first):
            for plane in range(self.model.planes):
                for slot, head in enumerate(self.heads):
                    view[plane, block, :, slot, :] = self.identity(request, position, (layer, plane, head))

    def foreign(self, layers: Sequence[View], request: int, blocks: Collection[int]) -> int:
        """Count the cells in a request's blocks that hold content of another request."""
        found = 0
        for view in layers:
            tags = view[:, list(blocks)]
            others = (tags != 0) & ((tags - 1) // self.values_a_request != request)
            found += int(by_cell(others).sum())
        return found

    def grade(
        self, layers: Sequence[View], request: int, blocks: Collection[int], taken: Collection[int] | None, first: int = 0
    ) -> Coverage:
        """Compare a request's cells with what this rank needs: `blocks` are those of its prompt from block `first` on.

        `taken` are the blocks of every request on this rank; None: strays aren't looked for.
        """
        counts = {"covered": 0, "wrong": 0, "missing": 0}
        stray = 0
        for layer, view in zip(self.numbers, layers, strict=False):
            for position, block in enumerate(blocks, first):
                for plane in range(self.model.planes):
                    for slot, head in enumerate(self.heads):
                        need = self.identity(request, position, (layer, plane, head))
                        counts[_grade_cell(view[plane, block, :, slot, :], need)] += 1
            if taken is None:
                continue
            others = [block for block in range(view.shape[1]) if block not in taken]
            stray += int(by_cell(view[:, others] != 0).sum())
        total = max(1, sum(counts.values()))
        return Coverage(counts["covered"] / total, counts["wrong"] / total, counts["missing"] / total, stray)


def by_cell(values: Any) -> Any:
    """Return whether anything in a cell is true, [planes, blocks, heads], of an array or a tensor."""
    return values.any(4).any(2)


def _grade_cell(cell: View, need: View) -> str:
    if np.array_equal(cell, need):
        return "covered"
    return "wrong" if cell.any() else "missing"
