"""The cases of the parity run: few, and with every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from kvcover.real_backend.evidence.all_pairs import Combination, all_pairs
from kvcover.real_backend.evidence.parity import model_view, plan
from kvcover.real_backend.evidence.plan import Planned
from kvcover.sim.releases.records import RELEASES
from kvcover.sim.scenario.scenario import Side

SMALL = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2, 3)}


def fits(case: Combination) -> bool:
    return not (case.get("a") == 2 and case.get("b") == "y")


@pytest.mark.parametrize("allowed", [lambda _: True, fits], ids=["free", "constrained"])
def test_every_allowed_pair_is_there_in_few_cases(allowed: object) -> None:
    assert callable(allowed)
    cases = all_pairs(SMALL, allowed)
    for one, other in combinations(SMALL, 2):
        for v, w in product(SMALL[one], SMALL[other]):
            found = any(case[one] == v and case[other] == w for case in cases)
            assert found == allowed({one: v, other: w})
    assert all(allowed(case) for case in cases)
    assert len(cases) < 3 * 2 * 2 * 4 / 2
    assert cases == all_pairs(SMALL, allowed)


def test_a_pair_that_fits_no_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value of c"):
        all_pairs({"a": (1,), "b": (2,), "c": (3,)}, lambda case: "c" not in case)


def test_the_plan_is_small_enough_for_an_hour_and_has_every_release() -> None:
    cases = plan()
    assert len({each.id for each in cases}) == len(cases) <= 400
    assert {each.scenario.release for each in cases} == set(RELEASES) - {"reference"}
    assert any(each.scenario.decode_release for each in cases)
    assert max(ranks(each.scenario.prefill) + ranks(each.scenario.decode) for each in cases) <= 16


def ranks(side: Side) -> int:
    return side.tp * side.dp


@pytest.mark.parametrize("planned", plan(), ids=lambda each: each.id)
def test_the_model_runs_every_case_of_the_plan(planned: Planned) -> None:
    _, view = model_view(planned.scenario)
    assert len(view["coverage"]) == ranks(planned.scenario.decode)
    assert view["outcome"] != "vacuous"
