"""Where a router sends requests when there are several instances and DP ranks: is every slot hit alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import msgspec

from kvcover.real_backend.driver.trial import ROLES
from kvcover.real_backend.router.record import Exchange, Shape
from kvcover.real_backend.router.stub_engine import SeenLeg


def crowd(mode: str) -> Shape:
    """Two instances a role, of two DP ranks each."""
    return Shape(mode=mode, prefill=(2, 2), decode=(2, 2), instances=2)


REQUESTS = 32
"""Each pair of slots twice, if all are hit alike."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """How often each slot and each pair of slots was hit. A slot is `P0.1`, an instance and DP rank; `P0` if no rank was named."""

    order: list[str]
    hits: dict[str, int]
    pairs: dict[str, int]
    never: list[str]

    def told(self) -> str:
        """In a line."""
        slots = ", ".join(f"{slot} {count}" for slot, count in self.hits.items())
        some = ", ".join(self.never[:4]) + (", …" if len(self.never) > 4 else "")
        met = len(self.pairs)
        missing = f"; {met} of {met + len(self.never)} pairs met, never {some}" if self.never else "; all pairs met"
        return f"{len(self.order)} requests hit {slots}{missing}"


def choices(exchanges: Sequence[Exchange]) -> Choices:
    """What was chosen, in order. Slots are those that were hit at all and, of ranks that are named, those that never were."""
    sides = [{_slot(each.leg(role)) for each in exchanges} | _all_slots(exchanges, index) for index, role in enumerate(ROLES)]
    order = [" ".join(_slot(each.leg(role)) for role in ROLES) for each in exchanges]
    pairs, hits = Counter(order), Counter(slot for pair in order for slot in pair.split())
    never = [f"{p}-{d}" for p, d in product(sorted(sides[0]), sorted(sides[1])) if not pairs[f"{p} {d}"]]
    return Choices(order=order, hits={slot: hits[slot] for side in sides for slot in sorted(side)}, pairs=dict(pairs), never=never)


def _all_slots(exchanges: Sequence[Exchange], index: int) -> set[str]:
    role = ROLES[index]
    shape, letter = exchanges[0].shape, role[0].upper()
    named = any(each.leg(role).dp_rank is not None for each in exchanges)
    ranks = [f".{rank}" for rank in range(shape.size(role)[1])] if named else [""]
    return {f"{letter}{instance}{rank}" for instance in range(shape.instances) for rank in ranks}


def _slot(leg: SeenLeg) -> str:
    rank = "" if leg.dp_rank is None else f".{leg.dp_rank}"
    return f"{leg.role[0].upper()}{leg.instance}{rank}"
