"""Whether a result is as it should be: as the scenario expects, or good at all, or proof of nothing."""

from __future__ import annotations

from kvcover.sim.results.result import GOOD, Result, failed_check
from kvcover.sim.scenario.scenario import Expect


def disagreement(result: Result, expect: Expect | None, check: bool) -> str:
    """What is not as it should be; empty when all is well, or when nobody asked. `vacuous` is never well.

    With `check` a run must be good. What a scenario expects is asked for besides, and takes nothing from that but what it
    names itself: another outcome, or a race.
    """
    if result.outcome == "vacuous" and (check or expect is not None):
        return "a planned fault never fired, so the run proves nothing"
    wanted = expect or Expect()
    if wanted.outcome is not None and wanted.outcome != result.outcome:
        return f"expected outcome {wanted.outcome}, got {result.outcome}"
    if check and wanted.outcome is None and result.outcome not in GOOD:
        return f"outcome is {result.outcome}, coverage {result.coverage:.4g}"
    if wanted.coverage is not None and abs(wanted.coverage - result.coverage) > 1e-9:
        return f"expected coverage {wanted.coverage:.6g}, got {result.coverage:.6g}"
    got = [rank.coverage for rank in result.by_rank]
    if wanted.by_rank is not None:
        if len(wanted.by_rank) != len(got):
            return f"expected coverage of {len(wanted.by_rank)} ranks, there are {len(got)}"
        for rank, (want, have) in enumerate(zip(wanted.by_rank, got, strict=True)):
            if have is None or abs(want - have) > 1e-9:
                return f"expected coverage {want:.6g} at decode rank {rank}, got {have}"
    if wanted.told is not None and set(wanted.told) != set(result.sets.told):
        return f"expected told {' '.join(wanted.told) or 'nobody'}, got {' '.join(result.sets.told) or 'nobody'}"
    if check and (failed := failed_check(result)) is not None:
        return f"outcome is ok, but {failed.name} failed: {failed.reason}"
    return _unexpected_race(result, wanted.race, check)


def unproven(results: list[Result]) -> str:
    """Why runs that are as they should be prove nothing all the same; empty if they prove something.

    A transfer must have been used in one of them: where all were refused, aborted or recomputed, nothing was put to the test.
    """
    used = any(check.name == "coverage-at-go" and check.verdict != "unknown" for result in results for check in result.checks)
    if not results:
        return "nothing was run"
    return "" if used else "no request used what was transferred, so nothing was put to the test"


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
