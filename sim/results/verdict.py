"""The one judge: whether a run, or many of them, pass, fail or show nothing. Every command that judges asks it.

A run passes if it was put to the test (its planned faults fired, and a request used what was transferred), its outcome is
good, and no check failed. What a scenario expects is demanded besides, and takes the place of what it names itself: another
outcome, or a race. Many runs pass if one does, none fails, and nothing was left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from kvcover.sim.releases.records import REFERENCE
from kvcover.sim.results.result import GOOD, Result
from kvcover.sim.scenario.scenario import Expect, build
from kvcover.sim.scenario.setup import resolve

_NEAR = 1e-9


class Verdict(msgspec.Struct, frozen=True):
    """What the judge says, and why: a line a reason, none if it is a pass.

    `idle`: inconclusive only because no request used what was transferred (all were refused, recomputed or aborted). Among
    runs that pass such a one is no lack.
    """

    status: Literal["pass", "fail", "inconclusive"]
    reasons: tuple[str, ...] = ()
    idle: bool = False

    @property
    def exit_code(self) -> int:
        """Of the command that asked."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.status]

    @property
    def passed(self) -> bool:
        return self.status == "pass"

    @property
    def text(self) -> str:
        """All reasons in one line; empty for a pass."""
        return "; ".join(self.reasons)


PASS = Verdict("pass")
Named = tuple[str, Verdict]


def fail(*reasons: str) -> Verdict:
    """It was put to the test, and is not as it should be."""
    return Verdict("fail", reasons)


def inconclusive(*reasons: str) -> Verdict:
    """Nothing is shown, neither good nor bad."""
    return Verdict("inconclusive", reasons)


def judge_expected(result: Result, expect: Expect) -> Verdict:
    """Whether the same came of a run as somebody wrote down, by what that names and nothing else: good or bad does not count."""
    unfired = [each.fault for each in result.faults if not each.fired]
    if unfired or result.outcome == "vacuous":
        return inconclusive(f"a planned fault never fired, so the run proves nothing: {', '.join(unfired)}")
    if wrong := tuple(_unexpected(result, expect)):
        return Verdict("fail", wrong)
    broken = next((each for each in result.findings if each.kind == "broken"), None)
    if broken is not None and msgspec.structs.replace(expect, race=None) != Expect():
        return inconclusive(f"{result.outcome} as expected, but what broke is no fault of the protocol: {broken.text}")
    return PASS


def judge_run(result: Result, expect: Expect | None = None, *, check: bool = True) -> Verdict:
    """Whether a run is as it should be.

    Without `check` only by what `expect` names; but who expects `ok` expects that no check failed and something was used.
    """
    wanted = expect or Expect()
    verdict = judge_expected(result, wanted)
    if verdict.status == "inconclusive" or not (check or wanted.outcome == "ok"):
        return verdict
    if wrong := (*verdict.reasons, *_bad(result, wanted, races=check)):
        return Verdict("fail", wrong)
    if wanted.outcome in (None, "ok") and not used(result):
        return Verdict("inconclusive", ("no request used what was transferred, so nothing was put to the test",), idle=True)
    return PASS


def judge_cells(results: Sequence[Result]) -> list[Named]:
    """The verdict of each cell of a matrix, in order, named by mode and TP sizes: `write P4→D8`."""
    return [(f"{each.mode} P{each.prefill['tp']}→D{each.decode['tp']}", judge_run(each)) for each in results]


def together(verdicts: Sequence[Named], what: str = "runs", left_out: Sequence[str] = ()) -> Verdict:
    """One verdict of many; `left_out` says of each thing that was asked for and not run, why."""
    total = len(verdicts) + len(left_out)
    failed = [(name, verdict) for name, verdict in verdicts if verdict.status == "fail"]
    moot = [(name, verdict) for name, verdict in verdicts if verdict.status == "inconclusive" and not verdict.idle]
    if failed:
        return fail(f"{len(failed)} of {total} {what} are not as they should be, first {_said(failed[0])}")
    if left_out:
        return inconclusive(f"{len(left_out)} of {total} {what} were not run: {', '.join(dict.fromkeys(left_out))}")
    if moot:
        return inconclusive(f"{len(moot)} of {total} {what} prove nothing, first {_said(moot[0])}")
    if not verdicts:
        return inconclusive("nothing was run")
    return PASS if any(verdict.passed for _, verdict in verdicts) else verdicts[0][1]


def used(result: Result) -> bool:
    """Whether something was transferred, and a request used it."""
    known = {check.name for check in result.checks if check.verdict != "unknown"}
    return {"coverage-at-go", "no-stray-write"} <= known


def _said(named: Named) -> str:
    return f"{named[0]}: {named[1].text}"


def _unexpected(result: Result, wanted: Expect) -> Iterator[str]:
    """What a scenario expects by name, and did not get. A tier that does not see order is asked for no race."""
    if wanted.outcome is not None and wanted.outcome != result.outcome:
        yield f"expected outcome {wanted.outcome}, got {result.outcome}"
    if wanted.coverage is not None and abs(wanted.coverage - result.coverage) > _NEAR:
        yield f"expected coverage {wanted.coverage:.6g}, got {result.coverage:.6g}"
    if wanted.told is not None and set(wanted.told) != set(result.sets.told):
        yield f"expected told {' '.join(wanted.told) or 'nobody'}, got {' '.join(result.sets.told) or 'nobody'}"
    if wanted.by_rank is not None:
        got = [rank.coverage for rank in result.by_rank]
        if len(wanted.by_rank) != len(got):
            yield f"expected coverage of {len(wanted.by_rank)} ranks, there are {len(got)}"
        else:
            for rank, (want, have) in enumerate(zip(wanted.by_rank, got, strict=True)):
                if have is None or abs(want - have) > _NEAR:
                    yield f"expected coverage {want:.6g} at decode rank {rank}, got {have}"
                    break
    race = next((each for each in result.checks if each.name == "no-race"), None)
    if wanted.race is True and race is not None and race.verdict == "pass":
        yield "expected a race, found none"
    if wanted.race is False and race is not None and race.verdict == "fail":
        yield _raced(race.reason)


def _bad(result: Result, wanted: Expect, races: bool) -> Iterator[str]:
    """What is bad in any run, unless the scenario expects it by name. A bad outcome explains the checks that failed."""
    if wanted.outcome is None and result.outcome not in _owed(result):
        yield f"outcome is {result.outcome}, coverage {result.coverage:.4g}"
    for each in result.checks:
        if each.verdict != "fail":
            continue
        if each.name == "no-race":
            if races and wanted.race is None:
                yield _raced(each.reason)
        elif result.outcome in GOOD:
            yield f"outcome is {result.outcome}, but {each.name} failed: {each.reason}"


def _raced(reason: str) -> str:
    return f"a race: {reason}; expect = {{race = true}} expects it"


def _owed(result: Result) -> tuple[str, ...]:
    """Outcomes that are good. The reference, when nothing is done to it, recomputes only if a request asks for no KV."""
    if result.outcome != "recomputed" or {result.release, result.decode_release} != {REFERENCE} or result.scenario is None:
        return GOOD
    scenario = build(result.scenario)
    asked = not any(request.plain or request.external_zero for request in resolve(scenario).requests)
    return ("ok", "refused") if asked and not scenario.faults and not scenario.overrides else GOOD
