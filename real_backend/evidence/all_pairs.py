"""A small set of cases in which every pair of values of any two factors occurs: greedy, and always the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]
Choice = tuple[str, int]
"""A factor and the position of one of its values."""


def all_pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool] = lambda _: True) -> list[Combination]:
    """Return cases that contain every allowed pair of values at least once.

    `allowed` judges a part of a case: the values chosen so far. Raises ValueError if it leaves a pair that fits no case.
    """

    def values(chosen: Mapping[str, int]) -> Combination:
        return {name: factors[name][index] for name, index in chosen.items()}

    open_pairs: dict[frozenset[Choice], None] = {}  # in order, unlike a set
    for one, other in combinations(factors, 2):
        for i, j in product(range(len(factors[one])), range(len(factors[other]))):
            if allowed(values({one: i, other: j})):
                open_pairs[frozenset({(one, i), (other, j)})] = None
    used: Counter[Choice] = Counter()
    cases: list[Combination] = []
    while open_pairs:
        chosen = dict(sorted(next(iter(open_pairs))))
        for name in factors:
            if name in chosen:
                continue
            fitting = [i for i in range(len(factors[name])) if allowed(values({**chosen, name: i}))]
            if not fitting:
                raise ValueError(f"no value of {name} goes with {values(chosen)}")

            def gain(index: int, name: str = name, chosen: Mapping[str, int] = chosen) -> tuple[int, int]:
                new = sum(frozenset({(name, index), choice}) in open_pairs for choice in chosen.items())
                return new, -used[name, index]

            chosen[name] = max(fitting, key=gain)
        for pair in combinations(chosen.items(), 2):
            open_pairs.pop(frozenset(pair), None)
        used.update(chosen.items())
        cases.append(values({name: chosen[name] for name in factors}))
    return cases
