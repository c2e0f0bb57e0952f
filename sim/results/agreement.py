"""What a real tier and the model must agree in, for the same scenario, and where they differ."""

from __future__ import annotations

from typing import Any

from kvcover.sim.results.result import Result

FIELDS = ("coverage", "wrong", "written", "told", "prefill_told", "prefill_released", "outcome")
View = dict[str, Any]


def view(result: Result) -> View:
    """The quantities that are compared, by decode rank where they are lists of numbers."""
    # A transfer of cells that were never filled leaves no trace in bytes, so only the model knows of it.
    ranks = zip(result.sets.needed, (rank for rank in result.by_rank if rank.coverage is not None), strict=True)
    empty = {name for name, rank in ranks if rank.missing == 1 and not rank.coverage_end}
    return {
        "coverage": [rank.coverage for rank in result.by_rank],
        "wrong": [rank.wrong for rank in result.by_rank],
        "covered_plus_wrong": [None if r.coverage is None else r.coverage + (r.wrong or 0.0) for r in result.by_rank],
        "written": [rank for rank in result.sets.written if rank not in empty],
        "told": result.sets.told,
        "prefill_told": result.sets.prefill_told,
        "prefill_released": result.sets.prefill_released,
        "outcome": result.outcome,
    }


def differences(model: View, real: View, omit: tuple[str, ...] = (), instead: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """[model, real] for each field that differs, but for those that a race decides; `instead` are compared in their place."""
    fields = [*(field for field in FIELDS if field not in omit), *instead]
    return {field: [model[field], real[field]] for field in fields if not _same(model[field], real[field])}


def _same(model: Any, real: Any) -> bool:
    if isinstance(model, list) and isinstance(real, list) and len(model) == len(real):
        return all(_same(one, other) for one, other in zip(model, real, strict=True))
    if isinstance(model, float) and isinstance(real, float):
        return abs(model - real) < 1e-9
    return bool(model == real)
