"""Where a router sends requests to several instances: slots that get none, and slots that never meet."""

from __future__ import annotations

from itertools import product

from kvcover.sim.results.chains import Cause, Found
from kvcover.sim.results.record import Record

_MOST_NAMED = 6
_WHY = {
    "one_counter": "{} takes prefill's instance and its DP rank, and decode's instance, from one number",
    "flat": "{} counts the slots of both sides by one number",
    "all_pairs": "{} lets all slots meet, one pair after another",
}


def uneven_slots(record: Record) -> list[Found]:
    """Slots (DP ranks of all instances) without a request and pairs without one, where there were requests enough for all."""
    setup = record.setup
    sides = (setup.prefill, setup.decode)
    if all(side.side.instances == 1 for side in sides):
        return []
    went = {(course.prefill_dp, course.decode_dp) for course in record.courses}
    names = [[side.engine_name(dp) for dp in range(side.all_dp)] for side in sides]
    hit = [{prefill for prefill, _ in went}, {decode for _, decode in went}]
    count, slots = len(record.courses), max(side.all_dp for side in sides)
    causes = [Cause(_WHY[setup.router.choice].format(setup.router.name))]
    unhit = [name for own, those in zip(names, hit, strict=True) for dp, name in enumerate(own) if dp not in those]
    if count >= slots and unhit:
        text = f"none of {count} requests went to {_some(unhit)}"
        return [Found(kind="unhit-slot", text=text, causes=causes)]
    pairs = list(product(range(len(names[0])), range(len(names[1]))))
    apart = [f"{names[0][p]} and {names[1][d]}" for p, d in pairs if (p, d) not in went]
    if count >= len(pairs) and apart:
        text = f"{len(pairs) - len(apart)} of {len(pairs)} pairs of slots met in {count} requests, never {_some(apart)}"
        return [Found(kind="unmet-pairs", text=text, causes=causes)]
    return []


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
