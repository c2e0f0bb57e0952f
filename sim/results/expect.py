"""Whether a result is as it should be: as the scenario expects, or good at all."""

from __future__ import annotations

from kvcover.sim.results.result import GOOD, Result
from kvcover.sim.scenario.scenario import Expect


def disagreement(result: Result, expect: Expect | None, check: bool) -> str:
    """What is not as it should be; empty when all is well, or when nobody asked. `vacuous` is never well."""
    if expect is None:
        if check and result.outcome not in GOOD:
            return f"outcome is {result.outcome}, coverage {result.coverage:.4g}"
        return _unexpected_race(result, None, check)
    if expect.outcome is not None and expect.outcome != result.outcome:
        return f"expected outcome {expect.outcome}, got {result.outcome}"
    if expect.coverage is not None and abs(expect.coverage - result.coverage) > 1e-9:
        return f"expected coverage {expect.coverage:.6g}, got {result.coverage:.6g}"
    got = [rank.coverage for rank in result.by_rank]
    if expect.by_rank is not None:
        if len(expect.by_rank) != len(got):
            return f"expected coverage of {len(expect.by_rank)} ranks, there are {len(got)}"
        for rank, (want, have) in enumerate(zip(expect.by_rank, got, strict=True)):
            if have is None or abs(want - have) > 1e-9:
                return f"expected coverage {want:.6g} at decode rank {rank}, got {have}"
    if expect.outcome is None and result.outcome == "vacuous":
        return "a planned fault never fired, so the run proves nothing"
    return _unexpected_race(result, expect.race, check)


def _unexpected_race(result: Result, wanted: bool | None, check: bool) -> str:
    """A race that nobody expects, or none where one is expected; a tier that does not see order is asked neither."""
    found = next((each for each in result.checks if each.name == "no-race" and each.verdict != "unknown"), None)
    if found is None:
        return ""
    if found.verdict == "pass":
        return "expected a race, found none" if wanted else ""
    if wanted or (wanted is None and not check):
        return ""
    return f"a race: {found.reason}; expect = {{race = true}} expects it"
