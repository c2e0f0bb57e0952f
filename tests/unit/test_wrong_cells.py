"""What wrong cells are said to hold, against what was put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcover import build
from kvcover.real_backend.inside.cells import Cells, LayerView, cells_of
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.cache.wrong import WrongCells, summary

BLOCKS = (3, 4)
Change = Callable[[Cells, LayerView], None]


def told(change: Change, **fields: Any) -> WrongCells:
    """Rank D1 of two, two layers of two heads here, request 0 of two in blocks 3 and 4, right until `change`."""
    scenario = {
        "model": "layers=2,kv_heads=4,head_dim=8",
        "decode": {"tp": 2},
        "prompt_tokens": 32,
        "requests": 2,
        "block_size": 16,
    }
    trial = to_trial(build(scenario | fields))
    (cells,) = cells_of(trial, "decode", 1)
    views = [cells.view(np.zeros(int(np.prod(cells.memory()[0])), dtype=np.int32)) for _ in range(2)]
    for layer, view in enumerate(views):
        cells.fill(view, layer, 0, BLOCKS, range(32))
    assert cells.wrong(views, 0, BLOCKS) == []
    change(cells, views[0])
    wrong = cells.wrong(views, 0, BLOCKS)
    assert len(wrong) == cells.grade(views, 0, BLOCKS).wrong
    kind = trial.setup.geometry
    return summary("D1", 0, wrong, kind.planes, kind.kv_heads)


def put(request: int, block: int, place: tuple[int, int, int]) -> Change:
    """Something else in K, the rank's first head (2), of the first block."""

    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, :, 0, :] = cells.identity(request, block, place)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (put(0, 0, (0, 0, 1)), "head", "holds head 1 of block 0"),
        (put(0, 1, (0, 0, 2)), "block", "holds head 2 of block 1"),
        (put(0, 0, (0, 1, 2)), "plane", "holds V head 2 of block 0"),
        (put(0, 0, (1, 0, 2)), "layer", "holds head 2 of block 0 of layer 1"),
        (put(1, 0, (0, 0, 2)), "request", "holds head 2 of block 0 of request 1"),
        (put(1, 1, (0, 0, 1)), "request", "holds head 1 of block 1 of request 1"),
    ],
)
def test_a_whole_cell_of_elsewhere_is_named(change: Change, kind: str, words: str) -> None:
    found = told(change)
    assert found.kinds == {kind: 1}
    assert found.first == [f"D1 layer 0 K head 2 block 0 {words}"]


def test_a_cell_of_which_a_part_was_never_written() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, 8:, 0, :] = 0

    found = told(change)
    assert found.kinds == {"partial": 1} and found.first == ["D1 layer 0 K head 2 block 0 holds only a part of head 2 of block 0"]


def test_two_heads_in_one_cell() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, 8:, 0, :] = cells.identity(0, 0, (0, 0, 1))[8:]

    found = told(change)
    assert found.kinds == {"mixed": 1}
    assert found.first == ["D1 layer 0 K head 2 block 0 holds parts of head 1 of block 0 and head 2 of block 0"] or found.first == [
        "D1 layer 0 K head 2 block 0 holds parts of head 2 of block 0 and head 1 of block 0"
    ]


def test_tokens_that_are_shifted_by_some() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        whole = np.concatenate([cells.identity(0, block, (0, 0, 2)) for block in (0, 1)])
        view[0, 3, :, 0, :] = whole[4:20]

    assert told(change).kinds == {"misaligned": 1}


def test_values_that_are_shifted_within_tokens() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, :, 0, :] = np.roll(cells.identity(0, 0, (0, 0, 2)), 1, axis=1)

    assert told(change).kinds == {"misaligned": 1}


def test_bytes_that_no_rank_wrote() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, :, 0, :] = np.int32(2**31 - 1)

    found = told(change)
    assert found.kinds == {"unknown": 1} and found.first == ["D1 layer 0 K head 2 block 0 holds unknown bytes"]


def test_content_of_another_type() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        view[0, 3, :, 0, :] = np.abs(cells.identity(0, 0, (0, 0, 2)))

    found = told(change, prefill={"kv_dtype": "fp16"}, decode={"tp": 2, "kv_dtype": "fp32"})
    assert found.kinds == {"dtype": 1} and found.first == ["D1 layer 0 K head 2 block 0 holds head 2 of block 0, of another type"]


def test_a_latent_has_no_plane_and_no_head_to_name_and_few_cells_are_told() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        for block in range(6):
            view[0, 3 + block, :, 0, :] = cells.identity(0, (block + 1) % 6, (0, 0, 0))

    scenario = {"model": "layers=2,mla=64+16", "decode": {"tp": 2}, "prompt_tokens": 96, "block_size": 16}
    trial = to_trial(build(scenario))
    (cells,) = cells_of(trial, "decode", 1)
    view = cells.view(np.zeros(int(np.prod(cells.memory()[0])), dtype=np.int32))
    change(cells, view)
    found = summary("D1", 0, cells.wrong([view], 0, range(3, 9)), 1, 1)
    assert found.kinds == {"block": 6}
    assert len(found.first) == 4 and found.first[0] == "D1 layer 0 block 0 holds block 1"


def test_the_first_of_each_kind_is_told_before_more_of_one() -> None:
    def change(cells: Cells, view: LayerView) -> None:
        for block, position in ((3, 0), (4, 1)):
            for slot in (0, 1):
                view[0, block, :, slot, :] = cells.identity(0, position, (0, 0, 0))
        view[1, 4, :, 1, :] = cells.identity(0, 1, (0, 0, 3))

    found = told(change)
    assert found.kinds == {"head": 4, "plane": 1} or found.kinds == {"plane": 1, "head": 4}
    assert sum(" holds K head" in line for line in found.first) == 1 and len(found.first) == 4
