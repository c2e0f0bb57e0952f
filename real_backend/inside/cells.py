"""Cells: what a model runner would have computed, as values that say where they belong, and how they are compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcover.real_backend.driver.trial import Role, Trial
from kvcover.sim.cache.geometry import AXES
from kvcover.sim.cache.layers import Group
from kvcover.sim.cache.ledger import Count
from kvcover.sim.cache.presets import DTYPE_BYTES
from kvcover.sim.cache.wrong import Held, Numbers, Place, held

LayerView = npt.NDArray[np.int32]
"""One layer of a rank's cache, shape [planes, blocks, block_size, heads, tags], whatever its order in memory."""
TAG_BYTES = 4
_MOST_TAGS = 2**31


@dataclass(frozen=True, slots=True)
class Numbering:
    """Room for a number for every token, layer, plane, global head and tag of each request, whatever layer it is of."""

    tokens: int
    layers: int
    planes: int
    heads: int
    tags: int
    prompts: tuple[int, ...]
    """Tokens of each request's prompt that prefill computes."""

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.prompts)

    @property
    def a_request(self) -> int:
        """Numbers that one request's content takes up."""
        return self.tokens * self.layers * self.planes * self.heads * self.tags

    def fits(self, requests: int) -> bool:
        """Whether a tag has a number for every value of so many requests."""
        return (requests + 1) * self.a_request < _MOST_TAGS


def numbering_of(trial: Trial) -> Numbering:
    """The numbering of a run's content, the same on all ranks."""
    kinds = trial.setup.geometry.kinds
    planes, heads, tags = (max(getattr(kind, name) for kind in kinds) for name in ("planes", "kv_heads", "head_dim"))
    left = trial.setup.geometry.has_states  # with a recurrent state decode computes the last token by itself, and prefill doesn't
    prompts = tuple(request.prompt_tokens - left for request in trial.setup.requests)
    return Numbering(trial.longest_prompt, trial.setup.geometry.layers, planes, heads, tags, prompts)


def cells_of(trial: Trial, role: Role, tp_rank: int) -> tuple[Cells, ...]:
    """The cells of one rank, layers that are alike together."""
    endpoint, numbering = trial.endpoint(role), numbering_of(trial)
    dtype = trial.kv_dtype(role)

    def of(group: Group) -> Cells:
        kind = group.geometry
        heads = kind.heads_of(tp_rank, endpoint.tp)
        if kind.state:  # which have a type of their own
            return Cells(group, heads, kind.head_dim, numbering)
        tags = kind.head_dim * DTYPE_BYTES[dtype] // TAG_BYTES
        return Cells(group, heads, tags, numbering, role == "decode" and dtype != trial.kv_dtype("prefill"))

    return tuple(of(group) for group in endpoint.groups)


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one rank in a group of layers that are alike, of which it holds the global `heads`.

    What lies behind the end of a prompt in its last block is nobody's concern. A (token, head) takes up `tags` tags of 4 bytes.
    With `foreign_dtype` no tag that the peer writes is what is needed.
    """

    group: Group
    heads: range
    tags: int
    numbering: Numbering
    foreign_dtype: bool = False

    def count(self, blocks: int) -> int:
        """Return how many cells so many blocks have in all its layers."""
        return len(self.group.layers) * self.group.shape.planes * len(self.heads) * blocks

    def memory(self) -> tuple[list[int], list[int]]:
        """Return the lengths of a cache's axes in memory, tags last, and where in `LayerView` its axes come from."""
        shape = self.group.shape
        named = AXES[shape.layout, shape.order]
        axes = named + "".join(axis for axis in "ph" if axis not in named)
        sizes = {"p": shape.planes, "b": shape.num_blocks, "t": shape.block_size, "h": len(self.heads)}
        return [*(sizes[axis] for axis in axes), self.tags], [*(axes.index(axis) for axis in "pbth"), 4]

    def view(self, cache: LayerView) -> LayerView:
        """Return a layer's cache in the shape of `LayerView` without a copy."""
        sizes, order = self.memory()
        return cache.reshape(sizes).transpose(order)

    def identity(self, request: int, block: int, place: tuple[int, int, int]) -> LayerView:
        """Return the content of one cell, [block_size, tags]: numbers never used elsewhere in the run; 0 behind the prompt's end.

        `block` counts the request's blocks from 0; `place` is (layer, plane, global head). Raises ValueError if 31 bits
        can't number every value.
        """
        room, (layer, plane, head) = self.numbering, place
        if not room.fits(request):
            raise ValueError("too many values for 31-bit tags: use fewer layers, heads or tokens")
        first = block * self.group.shape.block_size
        tokens = np.arange(first, first + self.group.shape.block_size, dtype=np.int64)[:, None]
        slot = ((tokens * room.layers + layer) * room.planes + plane) * room.heads + head
        tags = request * room.a_request + slot * room.tags + np.arange(self.tags, dtype=np.int64) + 1
        tags[tokens[:, 0] >= room.prompts[request]] = 0
        return (-tags if self.foreign_dtype else tags).astype(np.int32)

    def rows(self, tokens: range) -> list[tuple[int, slice]]:
        """Where so many tokens of a prompt lie: blocks of the request, counted from 0, and which of their rows.

        A recurrent state is one block, whatever its length: that after the last of the tokens.
        """
        if self.group.geometry.state:
            return [(tokens.stop - 1, slice(0, 1))]
        size = self.group.shape.block_size
        blocks = range(tokens.start // size, -(-tokens.stop // size))
        return [(each, slice(max(0, tokens.start - each * size), min(size, tokens.stop - each * size))) for each in blocks]

    def fill(self, view: LayerView, layer: int, request: int, table: Sequence[int], tokens: range) -> None:
        """Write one layer of some tokens of a request's prompt into the blocks of its `table`."""
        for position, rows in self.rows(tokens):
            block = table[0 if self.group.geometry.state else position]
            for plane in range(self.group.shape.planes):
                for slot, head in enumerate(self.heads):
                    view[plane, block, rows, slot, :] = self.identity(request, position, (layer, plane, head))[rows]

    def foreign(self, layers: Sequence[LayerView], requests: Collection[int], blocks: Collection[int]) -> int:
        """Count the cells in some blocks that hold content of other requests than these."""
        found = 0
        for view in layers:
            tags = view[:, list(blocks)]
            others = tags != 0
            for request in requests:
                others = others & ((tags - 1) // self.numbering.a_request != request)
            found += int(by_cell(others).sum())
        return found

    def changed(self, layers: Sequence[LayerView], taken: Collection[int]) -> int:
        """Count the cells that hold anything outside of the blocks `taken`."""
        others = [block for block in range(self.group.shape.num_blocks) if block not in taken]
        return sum(int(by_cell(view[:, others] != 0).sum()) for view in layers)

    def grade(self, layers: Sequence[LayerView], request: int, blocks: Collection[int], first: int = 0) -> Count:
        """Compare a request's cells with what this rank needs: `blocks` are those of its prompt from block `first` on."""
        return sum(self.grade_each(layers, request, blocks, first).values(), Count(0, 0, 0))

    def grade_each(self, layers: Sequence[LayerView], request: int, blocks: Collection[int], first: int = 0) -> dict[int, Count]:
        """As `grade`, by layer."""
        each = zip(self.group.layers, layers, strict=False)
        return {layer: self._grade_layer(layer, view, request, blocks, first) for layer, view in each}

    def _grade_layer(self, layer: int, view: LayerView, request: int, blocks: Collection[int], first: int) -> Count:
        counts = {"covered": 0, "wrong": 0, "missing": 0}
        for position, block in enumerate(blocks, first):
            for plane in range(self.group.shape.planes):
                for slot, head in enumerate(self.heads):
                    need = self.identity(request, position, (layer, plane, head))
                    counts[_grade_cell(view[plane, block, :, slot, :], need)] += 1
        return Count(counts["covered"], counts["wrong"], counts["missing"])

    def wrong(self, layers: Sequence[LayerView], request: int, blocks: Collection[int], first: int = 0) -> list[tuple[Place, Held]]:
        """Of the same cells as `grade` the wrong ones: which each is, and what it holds."""
        found = []
        for layer, view in zip(self.group.layers, layers, strict=False):
            held_here = self.on_host(view, blocks)
            for number, position in enumerate(range(first, first + len(blocks))):
                for plane in range(self.group.shape.planes):
                    for slot, head in enumerate(self.heads):
                        cell = held_here[plane, number, :, slot, :]
                        if _grade_cell(cell, self.identity(request, position, (layer, plane, head))) == "wrong":
                            want = Place(request, layer, plane, head, position)
                            found.append((want, self._held(want, cell)))
        return found

    def on_host(self, view: LayerView, blocks: Collection[int]) -> LayerView:
        """Some blocks of a layer's cache, in this process's memory."""
        return view[:, list(blocks)]

    def _held(self, want: Place, cell: LayerView) -> Held:
        """Read the tags of a cell: the reverse of `identity`."""
        room, empty = self.numbering, cell == 0
        slot: Numbers
        slot, value = np.divmod(np.abs(cell.astype(np.int64)) - 1, room.tags)
        slot, head = np.divmod(slot, room.heads)
        slot, plane = np.divmod(slot, room.planes)
        token, layer = np.divmod(slot, room.layers)
        request, token = np.divmod(token, room.tokens)
        numbers = {"request": request, "layer": layer, "plane": plane, "head": head, "token": token, "value": value}
        return held(want, numbers, empty, (cell > 0) & (request < room.requests), self.group.shape.block_size)


def by_cell(values: Any) -> Any:
    """Return whether anything in a cell is true, [planes, blocks, heads], of an array or a tensor."""
    return values.any(4).any(2)


def _grade_cell(cell: LayerView, need: LayerView) -> str:
    asked = need != 0
    if np.array_equal(cell[asked], need[asked]):
        return "covered"
    return "wrong" if cell[asked].any() else "missing"
