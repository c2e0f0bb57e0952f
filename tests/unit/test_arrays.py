"""Results as numpy arrays and as plain data, by the public door."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from kvcover import Scenario, Side, arrays, build, matrix, read_results, run


def test_columns_are_the_results_in_order(tmp_path: Path) -> None:
    results = matrix(build({"release": "0.26.0", "model": "layers=3,mla=8"}), prefill=[1, 2], decode=[1, 4])
    (tmp_path / "m.jsonl").write_text("\n".join(result.to_json() for result in results))
    read = read_results(tmp_path / "m.jsonl")
    assert [each.to_dict() for each in read] == [each.to_dict() for each in results]
    table = arrays(read)
    for row, result in enumerate(results):
        assert (table["mode"][row], table["outcome"][row], table["prefill_tp"][row]) == (
            result.mode,
            result.outcome,
            result.prefill["tp"],
        )
        assert table["coverage"][row] == result.coverage
        ranks = [rank.coverage for rank in result.by_rank]
        assert table["rank_coverage"][row][: len(ranks)].tolist() == ranks
        assert np.isnan(table["rank_coverage"][row][len(ranks) :]).all()
        assert [list(layers) for layers in table["layer_coverage"][row][: len(ranks)]] == [rank.by_layer for rank in result.by_rank]
    assert {len(column) for column in table.values()} == {8}
    assert table["layer_coverage"].shape == (8, 4, 3)


def test_what_a_tier_does_not_know_is_nan() -> None:
    result = run(Scenario(model="layers=2,mla=8", decode=Side(tp=2)))
    ranks = [msgspec.structs.replace(rank, by_layer=None, coverage=None) for rank in result.by_rank]
    table = arrays([result, msgspec.structs.replace(result, stray=None, virtual_ns=None, by_rank=ranks)])
    assert np.isnan(table["stray"]).tolist() == np.isnan(table["virtual_ns"]).tolist() == [False, True]
    assert np.isnan(table["layer_coverage"][1]).all() and np.isnan(table["rank_coverage"][1]).all()
    assert not np.isnan(table["layer_coverage"][0]).any()


def test_no_result_is_no_row() -> None:
    assert {len(column) for column in arrays([]).values()} == {0}
