"""What our model runner makes of vLLM's scheduler outputs, and what its chunks leave in a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcover import build
from kvcover.real_backend.evidence.measure import merge
from kvcover.real_backend.inside.batch import Batch
from kvcover.real_backend.inside.cells import Cells, cells_of
from kvcover.real_backend.tiers.translate import to_trial


def output(
    scheduled: dict[str, int],
    new: dict[str, tuple[int, list[int]]] | None = None,
    cached: dict[str, tuple[int, list[int] | None]] | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput of one cache group: requests with computed tokens and blocks."""
    known = cached or {}
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, (computed, blocks) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(known),
            resumed_req_ids=set(resumed),
            num_computed_tokens=[computed for computed, _ in known.values()],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks in known.values()],
        ),
    )


def test_a_request_keeps_its_blocks_over_its_steps_and_gets_new_ones_when_resumed() -> None:
    batch = Batch()
    steps = [
        output({"a": 30, "b": 2}, new={"a": (0, [4, 2]), "b": (16, [9, 3])}),
        output({"a": 30, "b": 1}, cached={"a": (30, [7, 5]), "b": (18, None)}),
        output({"b": 19}, cached={"b": (0, [1, 6])}, resumed=("b",), finished=("a",)),
        output({"a": 1}, new={"a": (0, [8])}),
    ]
    seen = [[(each.request_id, each.tokens, each.tables[0]) for each in batch.take(step)] for step in steps[:1]]
    seen += [[(each.request_id, each.tokens, list(each.tables[0])) for each in batch.take(step)] for step in steps[1:]]
    assert seen[1:] == [
        [("a", range(30, 60), [4, 2, 7, 5]), ("b", range(18, 19), [9, 3])],
        [("b", range(19), [1, 6])],
        [("a", range(1), [8])],
    ]
    assert [each[:2] for each in seen[0]] == [("a", range(30)), ("b", range(16, 18))]


def cells(prompt_tokens: int, **fields: Any) -> tuple[Cells, np.ndarray[Any, np.dtype[np.int32]]]:
    """The cells of a rank's two layers of one head, and the cache of one of them."""
    given = {"model": "layers=2,kv_heads=1,head_dim=4", "prompt_tokens": prompt_tokens, "block_size": 4, "kv_dtype": "fp32"}
    (found,) = cells_of(to_trial(build(given | fields)), "prefill", 0)
    return found, found.view(np.zeros(int(np.prod(found.memory()[0])), dtype=np.int32))


@pytest.mark.parametrize("chunks", [[10], [4, 6], [3, 3, 4], [1] * 10])
def test_chunks_of_any_size_leave_the_same_cache_as_one(chunks: list[int]) -> None:
    found, view = cells(10)
    _, whole = cells(10)
    found.fill(whole, 0, 0, (2, 5, 3), range(10))
    first = 0
    for count in chunks:
        assert found.grade([view], 0, (2, 5, 3)).covered < 6  # K and V of three blocks
        found.fill(view, 0, 0, (2, 5, 3), range(first, first + count))
        first += count
    assert (view == whole).all() and found.grade([view], 0, (2, 5, 3)).covered == 6
    assert not view[:, 3, 2:].any() and view[:, 3, :2].all()  # two of its four rows are the prompt's


def test_what_lies_behind_a_prompts_end_is_nobodys_concern() -> None:
    found, view = cells(10)
    found.fill(view, 0, 0, (2, 5, 3), range(10))
    view[:, 3, 2:] = 77
    assert found.grade([view], 0, (2, 5, 3)).covered == 6 and found.wrong([view], 0, (2, 5, 3)) == []
    view[0, 3, 1] = 77
    assert found.grade([view], 0, (2, 5, 3)).wrong == 1
    view[0, 3, :2] = 0
    assert found.grade([view], 0, (2, 5, 3)).missing == 1


def test_a_table_of_another_harness_is_never_added_to(tmp_path: Any) -> None:
    other = tmp_path / "measured.toml"
    other.write_text("# Measured with something else.\n")
    with pytest.raises(SystemExit, match="another harness"):
        merge(other, [{"id": "x"}])
    assert other.read_text() == "# Measured with something else.\n"
    merge(tmp_path / "new.toml", [])
    merge(tmp_path / "new.toml", [])
