"""What a run before a fix must show: the fault's signature, and not merely something bad.

From the model of that release, which plays the same scenario; from a public report of the corpus; or given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcover.real_backend.evidence.reading import ran
from kvcover.sim.errors import InputError, nearest, short
from kvcover.sim.releases.records import ALIASES, RELEASES
from kvcover.sim.results.result import GOOD, RankCoverage, Result, on_one_machine
from kvcover.sim.scenario.scenario import Expect, Scenario, Timers, build
from kvcover.sim.search.corpus import PublicReport, cases, load_corpus, select, spans
from kvcover.sim.search.explore_tier import plays

_NEAR = 1e-9
_MOST_RANKS = 8
_LISTS: dict[str, Callable[[str], Any]] = {"by_rank": float, "told": str}


@dataclass(frozen=True, slots=True)
class Expected:
    """A signature and who says so; `plays` are several that are all as good, as processes that race may end in any."""

    source: str
    plays: Callable[[], Iterable[Expect]]

    def unlike(self, seen: Result) -> str:
        """How a run differs from what was expected, rank by rank where ranks differ; empty if it shows the signature."""
        nearest_play: list[str] | None = None
        for play in self.plays():
            found = list(_differences(play, seen))
            if not found:
                return ""
            nearest_play = found if nearest_play is None or len(found) < len(nearest_play) else nearest_play
        return f"not what {self.source} says: {'; '.join(nearest_play or ['nothing'])}"


def by_model(result: Result) -> Expected:
    """What the model of the release makes of the scenario that a result of any tier is of."""
    scenario = build(result.scenario or {})
    backend = result.backend or {}
    if on_one_machine(result):  # bytes are there when a batch is posted, or as good as that
        scenario = msgspec.structs.replace(scenario, fabric="loopback")
    if timers := backend.get("timers_s"):  # set small, for a run to end soon
        own = {f"{name}_s": float(value) for name, value in timers.items()}
        scenario = msgspec.structs.replace(scenario, timers=msgspec.convert(own, Timers))
    rules = dict.fromkeys(_rules(scenario))
    source = f"the model of {' and '.join(rules)}"
    if any(found is not None and not found.exact for found in (ran(result, side) for side in ("prefill", "decode"))):
        source += ", from which it is derived,"
    return Expected(source, lambda: (signature(play) for play in plays(scenario)))


def by_report(name: str, release: str, decode_release: str) -> Expected:
    """What the corpus says of a report's own scenario on a release. Raises InputError if it says nothing bad of it."""
    report = find_report(name)
    if ALIASES.get(release, release) != ALIASES.get(decode_release, decode_release):
        raise InputError("--report", f"it knows one release, not {release} and {decode_release}", "use --expect-before")
    named = {case.release: case.expected for case in cases([report]) if not case.variant}
    bad = [each for each, expected in named.items() if expected.outcome not in GOOD]
    expected = named.get(ALIASES.get(release, release))
    if expected is None or expected.outcome in GOOD:
        what = f"says nothing of {release}" if expected is None else f"has {release} {expected.outcome}"
        raise InputError("--report", f"{report.report} {what}", f"take for before {spans(bad)}" if bad else "take another report")
    told = Expect(outcome=expected.outcome, coverage=expected.coverage, by_rank=expected.by_rank)
    return Expected(f"{report.report} of {release}", lambda: [told])


def early(report: str | None, text: str | None, before: str | None) -> None:
    """Raise InputError, before anything runs or is read, for an expectation that makes no sense."""
    if text is not None and report is not None:
        raise InputError("--expect-before", "a report is named, too", "use one of the two")
    if text is not None:
        given(text)
    if report is not None:
        find_report(report)
        if before is not None and (before in RELEASES or before in ALIASES):
            by_report(report, before, before)


def find_report(name: str) -> PublicReport:
    """The report of the corpus of that name. Raises InputError if there is none."""
    try:
        return select(load_corpus(), [name])[0]
    except InputError as error:
        raise InputError("--report", error.problem, error.hint) from None


def given(text: str) -> Expected:
    """What `--expect-before` says, such as `outcome=corrupt,coverage=0.125,by_rank=1+0,told=D0+D1`. Raises InputError."""
    place, fields = "--expect-before", {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in Expect.__struct_fields__:
            raise InputError(place, f"no field {short(name)} in {short(text)}", nearest(name, Expect.__struct_fields__))
        if not equals or name in fields:
            raise InputError(place, f"can't read {short(text)}", "write outcome=corrupt,coverage=0.125,by_rank=1+0,told=D0+D1")
        fields[name] = _value(place, name, value)
    expect = build({"expect": fields}).expect or Expect()
    if expect.outcome is None or (expect.outcome in (*GOOD, "vacuous") and not expect.race):
        raise InputError(place, f"{short(text)} names no bad outcome", "say outcome=corrupt, or what it is that is to be repaired")
    if (expect.coverage, expect.by_rank, expect.told, expect.race) == (None,) * 4:
        text = f"{short(text)} is shown by whatever ends so, a process asleep as well as the fault that is meant"
        raise InputError(place, text, "add which ranks were covered (by_rank=1+0) or told (told=D0, told= for nobody)")
    return Expected("--expect-before", lambda: [expect])


def _value(place: str, name: str, value: str) -> Any:
    if name == "outcome":
        return value
    if name == "race":
        return {"true": True, "false": False}.get(value, value)
    convert = _LISTS.get(name, float)
    try:
        parts = [convert(part) for part in value.split("+") if value]
    except ValueError:
        raise InputError(place, f"{name}: {short(value)} is no number", "write coverage=0.125, by_rank=1+0") from None
    return parts if name in _LISTS else parts[0] if len(parts) == 1 else value


def signature(result: Result) -> Expect:
    """What a result shows of a fault."""
    shares = [rank.coverage for rank in result.by_rank]
    race = next((check.verdict for check in result.checks if check.name == "no-race"), "unknown")
    return Expect(
        outcome=msgspec.convert(result.outcome, Any),
        coverage=result.coverage,
        by_rank=None if None in shares else tuple(share for share in shares if share is not None),
        told=tuple(result.sets.told),
        race=None if race == "unknown" else race == "fail",
    )


def _rules(scenario: Scenario) -> tuple[str, str]:
    return scenario.release, scenario.decode_release or scenario.release


def _differences(wanted: Expect, seen: Result) -> Iterator[str]:
    if wanted.outcome is not None and wanted.outcome != seen.outcome:
        yield f"outcome {wanted.outcome}, seen {seen.outcome}"
    if wanted.by_rank is not None:
        yield from _ranks(wanted.by_rank, seen.by_rank)
    if wanted.coverage is not None and abs(wanted.coverage - seen.coverage) > _NEAR:
        yield f"coverage {wanted.coverage:.6g}, seen {seen.coverage:.6g}"
    if wanted.told is not None and set(wanted.told) != set(seen.sets.told):
        yield f"told {' '.join(wanted.told) or 'nobody'}, seen {' '.join(seen.sets.told) or 'nobody'}"
    race = signature(seen).race
    if wanted.race and race is None and wanted.outcome in GOOD:  # all that was wrong is the race
        yield "a race, which this tier does not see"
    if wanted.race is not None and race is not None and race != wanted.race:
        yield "a race, seen none" if wanted.race else "no race, seen one"


def _ranks(wanted: tuple[float, ...], seen: list[RankCoverage]) -> Iterator[str]:
    if len(wanted) != len(seen):
        yield f"{len(wanted)} decode ranks, seen {len(seen)}"
        return
    wrong = [
        f"D{rank.dp}.{rank.tp} covered {share:.6g}, seen {'none' if rank.coverage is None else f'{rank.coverage:.6g}'}"
        for share, rank in zip(wanted, seen, strict=True)
        if rank.coverage is None or abs(share - rank.coverage) > _NEAR
    ]
    yield from wrong[:_MOST_RANKS]
    if len(wrong) > _MOST_RANKS:
        yield f"and {len(wrong) - _MOST_RANKS} ranks more"
