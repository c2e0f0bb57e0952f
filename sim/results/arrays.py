"""Many results as numpy arrays, one element a result, for notebooks and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcover.sim.results.result import Result

_TEXTS = ("tier", "release", "decode_release", "mode", "model", "router", "outcome")
_NUMBERS = ("coverage", "coverage_end", "wrong", "stray", "seconds", "virtual_ns")
_BY_RANK = ("coverage", "wrong", "missing", "coverage_end")


def arrays(results: Sequence[Result]) -> dict[str, NDArray[Any]]:
    """Results as columns, each in the order of the results. What a result does not know, or has not, is NaN.

    `tier`, `release`, `decode_release`, `mode`, `model`, `router` and `outcome` are text; `prefill_tp`, `prefill_dp`, `decode_tp`
    and `decode_dp` whole numbers. `coverage`, `coverage_end` and `wrong` are shares of the cells, `stray` is in cells, `seconds` in
    s, `virtual_ns` in ns. Of shape (results, decode ranks), in the order of `by_rank`: `rank_coverage`, `rank_wrong`,
    `rank_missing`, `rank_coverage_end`. Of shape (results, decode ranks, layers): `layer_coverage`. All of one result as plain data
    gives `Result.to_dict`.

    >>> table = arrays(matrix(Scenario(release="0.27.0", model="deepseek-v3"), prefill=[4], decode=[4, 8], modes=["write"]))
    >>> table["coverage"].tolist(), table["outcome"].tolist()
    ([1.0, 0.5], ['ok', 'hang'])
    >>> table["rank_coverage"].shape, table["layer_coverage"].shape
    ((2, 8), (2, 8, 61))
    """
    found: dict[str, NDArray[Any]] = {name: np.array([getattr(each, name) for each in results], dtype=np.str_) for name in _TEXTS}
    for side in ("prefill", "decode"):
        for size in ("tp", "dp"):
            found[f"{side}_{size}"] = np.array([getattr(each, side)[size] for each in results], dtype=np.int64)
    for name in _NUMBERS:
        found[name] = np.array([_number(getattr(each, name)) for each in results], dtype=np.float64)
    ranks = max((len(each.by_rank) for each in results), default=0)
    layers = max((len(rank.by_layer or ()) for each in results for rank in each.by_rank), default=0)
    for name in _BY_RANK:
        found[f"rank_{name}"] = np.full((len(results), ranks), np.nan)
    found["layer_coverage"] = np.full((len(results), ranks, layers), np.nan)
    for row, each in enumerate(results):
        for column, rank in enumerate(each.by_rank):
            for name in _BY_RANK:
                found[f"rank_{name}"][row, column] = _number(getattr(rank, name))
            if rank.by_layer:
                found["layer_coverage"][row, column, : len(rank.by_layer)] = [_number(share) for share in rank.by_layer]
    return found


def _number(value: float | None) -> float:
    return np.nan if value is None else value
