"""Public fault reports as scenarios: `faults/corpus/*.toml`, one file a report, and what each release should make of it.

`load_corpus` reads the files, `cases` spreads a report over its variants and releases, `run_cases` runs them, and
`page` writes `docs/corpus.md` (`python -m kvcover.sim.search.corpus`; a test checks that it is current).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvcover.sim.errors import InputError, TierError, nearest
from kvcover.sim.releases.records import PUBLISHED
from kvcover.sim.results.result import GOOD, Result
from kvcover.sim.results.verdict import Verdict, fail, judge_expected
from kvcover.sim.scenario.scenario import Expect, Outcome, Scenario, build
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.tiers import Tier, fault_kinds, load_tier

PAGE = Path(__file__).resolve().parents[2] / "docs" / "corpus.md"
NOT_MODELLED = "_not_modelled.toml"
EVIDENCE = {
    "measured": "the real connector gave this in the harness, where a row is named",
    "source": "follows from the released files of the connector, or from a run of it without a row",
    "report": "only the report says so; the scenario carries its kind of fault over to MoRI-IO",
}
Kind = TypeVar("Kind", bound=msgspec.Struct)
_FIXED_FIELDS = ("release", "decode_release", "expect", "schema")

Share = Annotated[float, Meta(ge=0, le=1)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z-]+#[0-9]+$")]
Text = Annotated[str, Meta(min_length=1, pattern=r"^\S")]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are errors."""


class Expected(_Strict, frozen=True):
    """What a release should make of a scenario.

    `bad` are the requests whose outcome is not good; `row` is the row of `tests/data/measured.toml`, without its
    release, in which the real connector gave the same.
    """

    outcome: Outcome
    coverage: Share | None = None
    by_rank: tuple[Share, ...] | None = None
    bad: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    row: Text | None = None


class Variant(_Strict, frozen=True):
    """The same report with some fields of its scenario exchanged whole: a remedy, or another size."""

    name: Annotated[str, Meta(min_length=1, max_length=17)]
    why: Text
    scenario: dict[str, Any]
    expect: dict[str, Expected]


class PublicReport(_Strict, frozen=True):
    """One public report. `also` are other threads of the same fault; a scenario has no release, `expect` names them."""

    report: Id
    url: Annotated[str, Meta(pattern=r"^https://github\.com/[^/]+/[^/]+/(issues|pull)/[0-9]+$")]
    title: Annotated[str, Meta(min_length=1, max_length=80)]
    seen: Text
    why: Text
    evidence: Literal["measured", "source", "report"]
    scenario: dict[str, Any]
    expect: dict[str, Expected]
    also: tuple[Id, ...] = ()
    variants: tuple[Variant, ...] = ()


class Omitted(_Strict, frozen=True):
    """Reports that no scenario stands for, and why."""

    ids: tuple[Id, ...]
    text: Text
    reason: Text


class _OmittedFile(_Strict, frozen=True):
    report: tuple[Omitted, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One report, variant (empty: the report itself) and release, ready to run."""

    report: PublicReport
    variant: str
    why: str
    release: str
    scenario: Scenario
    expected: Expected

    @property
    def name(self) -> str:
        """`vllm#47764 remedy 0.26.0`."""
        return f"{self.of_any_release} {self.release}"

    @property
    def of_any_release(self) -> str:
        """`vllm#47764 remedy`."""
        return f"{self.report.report} {self.variant}".strip()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A case, what came of it, and whether that is as expected."""

    case: Case
    result: Result
    verdict: Verdict

    @property
    def problem(self) -> str:
        """Empty when it is as expected."""
        return self.verdict.text

    def to_dict(self) -> dict[str, Any]:
        """The result as every command prints it, with what the corpus says of it."""
        case = self.case
        expected = {k: v for k, v in msgspec.to_builtins(case.expected).items() if v is not None and k != "row"}
        said = {
            "report": case.report.report,
            "variant": case.variant,
            "evidence": case.report.evidence,
            "expected": expected,
            "as_expected": not self.problem,
            "problem": self.problem,
            "measured": f"{case.release}/{case.expected.row}" if case.expected.row else None,
        }
        return self.result.to_dict() | {"corpus": said}


# -- reading -----------------------------------------------------------------------------------------------------


def corpus_files() -> list[Traversable]:
    """The files of the reports, by name."""
    found = [file for file in files("kvcover.faults").joinpath("corpus").iterdir() if file.name.endswith(".toml")]
    return sorted((file for file in found if not file.name.startswith("_")), key=lambda file: file.name)


def load_corpus() -> list[PublicReport]:
    """All reports; raises InputError naming file and field for what can't be right."""
    return [load_report(file) for file in corpus_files()]


def load_report(file: Traversable) -> PublicReport:
    """One report, with every scenario built and resolved for every release that it names."""
    report = _convert(_toml(file), PublicReport, file.name)
    stem = report.report.lower().replace("#", "-")
    if file.name != f"{stem}.toml":
        raise InputError(f"{file.name}: report", f"{report.report!r} is kept in {stem}.toml", "rename the file")
    named = [expected.row for _, _, _, expect in _parts(report) for expected in expect.values() if expected.row]
    if (report.evidence == "measured") != bool(named):
        raise InputError(f"{file.name}: evidence", f"{report.evidence!r} with {len(named)} rows", "measured is what has a row")
    for _ in cases([report], place=file.name):
        pass
    return report


def load_omitted() -> tuple[Omitted, ...]:
    """Reports without a scenario."""
    file = files("kvcover.faults").joinpath("corpus", NOT_MODELLED)
    return _convert(_toml(file), _OmittedFile, file.name).report


def _toml(file: Traversable) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(file.name, f"can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(file.name, f"is not TOML: {error}") from None


def _convert(data: dict[str, Any], struct: type[Kind], name: str) -> Kind:
    """The table as a struct; what does not fit is an InputError with the file and the field."""
    _check_fields(struct, data, name, "")
    try:
        return msgspec.convert(data, struct, strict=True)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        place = f"{name}: {path.strip('`').lstrip('.')}" if path else name
        raise InputError(place, problem[0].lower() + problem[1:].replace("`", "")) from None


_TABLES: dict[tuple[type[msgspec.Struct], str], type[msgspec.Struct]] = {
    (PublicReport, "variants"): Variant,
    (PublicReport, "expect"): Expected,
    (Variant, "expect"): Expected,
    (_OmittedFile, "report"): Omitted,
}


def _check_fields(struct: type[msgspec.Struct], data: Any, name: str, place: str) -> None:
    """Unknown fields, at any depth, with the nearest right name; msgspec's message names no key of a table."""
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if key not in struct.__struct_fields__:
            raise InputError(f"{name}: {place}{key}", "no such field", nearest(str(key), struct.__struct_fields__))
        inner = _TABLES.get((struct, key))
        if inner is Expected and isinstance(value, Mapping):
            for releases, expected in value.items():
                _check_fields(inner, expected, name, f"{place}{key}.{releases!r}.")
        elif inner is not None and isinstance(value, list):
            for index, item in enumerate(value):
                _check_fields(inner, item, name, f"{place}{key}[{index}].")


def releases_of(text: str, place: str) -> list[str]:
    """The releases that `0.24.0, 0.27.0..0.32.0` names."""
    known = PUBLISHED
    found: list[str] = []
    for part in text.split(","):
        ends = [end.strip() for end in part.split("..")]
        for end in ends:
            if end not in known:
                raise InputError(place, f"no release {end!r}", nearest(end, known))
        if len(ends) > 2 or known.index(ends[0]) > known.index(ends[-1]):
            raise InputError(place, f"can't read {part.strip()!r}", "write 0.27.0 or 0.27.0..0.32.0")
        found += known[known.index(ends[0]) : known.index(ends[-1]) + 1]
    return found


# -- cases -------------------------------------------------------------------------------------------------------


def _parts(report: PublicReport) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Expected]]]:
    """Name, reason, scenario and expectations of a report and its variants."""
    yield "", report.why, report.scenario, report.expect
    for variant in report.variants:
        yield variant.name, variant.why, report.scenario | variant.scenario, variant.expect


def cases(reports: Iterable[PublicReport], releases: Sequence[str] = (), place: str = "") -> Iterator[Case]:
    """Every (report, variant, release) of some reports, or only those of some releases."""
    for report in reports:
        for number, (variant, why, scenario, expect) in enumerate(_parts(report)):
            prefix = "" if number == 0 else f"variants[{number - 1}]."
            where = f"{place or report.report}: {prefix}"
            for field in _FIXED_FIELDS:
                if field in scenario:
                    raise InputError(f"{where}scenario.{field}", "is not part of a report's scenario", "name releases in `expect`")
            given: set[str] = set()
            for text, expected in expect.items():
                for release in releases_of(text, f"{where}expect.{text!r}"):
                    if release in given:
                        raise InputError(f"{where}expect.{text!r}", f"{release} is named twice", "name each release once")
                    given.add(release)
                    if releases and release not in releases:
                        continue
                    built = _build(scenario | {"release": release}, f"{where}scenario")
                    yield Case(report=report, variant=variant, why=why, release=release, scenario=built, expected=expected)
            if not given:
                raise InputError(f"{where}expect", "names no release", "write what at least one release does")


def _build(data: dict[str, Any], place: str) -> Scenario:
    try:
        scenario = build(data)
        resolve(scenario)
    except InputError as error:
        raise InputError(f"{place}.{error.place}", error.problem, error.hint) from None
    return scenario


def select(reports: Sequence[PublicReport], names: Sequence[str]) -> list[PublicReport]:
    """The reports of some ids, such as `vllm#47764` or `vllm-47764`, in the order of the corpus; all without a name."""
    ids = [name for report in reports for name in (report.report, *report.also)]
    by_name = {name.lower().replace("#", "-"): report for report in reports for name in (report.report, *report.also)}
    wanted = []
    for name in names:
        key = name.lower().replace("#", "-").removesuffix(".toml")
        if key not in by_name:
            raise InputError("corpus", f"no report {name!r}", nearest(name, ids))
        wanted.append(by_name[key])
    return [report for report in reports if not names or report in wanted]


# -- running -----------------------------------------------------------------------------------------------------


def judge(case: Case, result: Result) -> Judged:
    """Compare a result with what was expected."""
    want = case.expected
    verdict = judge_expected(result, Expect(outcome=want.outcome, coverage=want.coverage, by_rank=want.by_rank))
    bad = tuple(index for index, outcome in enumerate(result.by_request) if outcome not in GOOD)
    if verdict.passed and want.bad is not None and bad != want.bad:
        verdict = fail(f"expected that requests {list(want.bad)} are bad, got {list(bad)}")
    return Judged(case=case, result=result, verdict=verdict)


def able(wanted: Sequence[Case], tier: Tier) -> list[Case]:
    """The cases whose faults a tier can inject; raises TierError if there are none."""
    found = [case for case in wanted if tier.can.faults.issuperset(fault_kinds(case.scenario))]
    if wanted and not found:
        raise TierError("--tier", f"{tier.name!r} can't inject the faults of these reports", "use --tier model")
    return found


def run_cases(wanted: Sequence[Case], tier: str = "model") -> list[Judged]:
    """Run cases on a tier; those whose faults it can't inject are left out."""
    chosen = load_tier(tier)
    cases = able(wanted, chosen)
    results = chosen.many([case.scenario for case in cases])
    return [judge(case, result) for case, result in zip(cases, results, strict=True)]


# -- the page ----------------------------------------------------------------------------------------------------


def spans(releases: Iterable[str]) -> str:
    """`0.24.0, 0.27.0–0.32.0` for some releases."""
    wanted = set(releases)
    runs: list[list[str]] = []
    for before, name in zip(["", *PUBLISHED], PUBLISHED, strict=False):
        if name in wanted and before in wanted:
            runs[-1].append(name)
        elif name in wanted:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def page() -> str:
    """`docs/corpus.md` as Markdown."""
    reports, omitted = load_corpus(), load_omitted()
    measured = sum(report.evidence == "measured" for report in reports)
    lines = [
        "# Public reports as scenarios",
        "",
        "Written from `faults/corpus/` by `python -m kvcover.sim.search.corpus`; do not edit. `kvcover corpus` runs",
        "every report for every release that it names, `kvcover corpus vllm#47764` shows one in full, `--check` fails if anything",
        "is not as expected. What is expected was written down by hand from the report, the released sources or measured rows,",
        "not taken from the model.",
        "",
        f"{len(reports)} files, {measured} of them confirmed on the real connector, at least in part. Evidence of a file:",
        "",
        *(f"- {name}: {text}" for name, text in EVIDENCE.items()),
        "",
        "| report | what goes wrong | expected, bad | expected, good | evidence |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        ids = ", ".join([f"[{report.report}]({report.url})", *report.also])
        bad, good = _by_outcome(report)
        lines.append(f"| {ids} | {report.title} | {bad or '–'} | {good or '–'} | {report.evidence} |")
    lines += [
        "",
        "The two columns are those of the report's own scenario; its file has the variants, such as the remedy.",
        "",
        "## Not modelled",
        "",
        "| reports | what they are about | why there is no scenario |",
        "|---|---|---|",
        *(f"| {', '.join(entry.ids)} | {entry.text} | {entry.reason} |" for entry in omitted),
    ]
    return "\n".join(lines) + "\n"


def _by_outcome(report: PublicReport) -> tuple[str, str]:
    """`corrupt 0.25.1–0.26.0` for the bad and for the good outcomes of the report's own scenario."""
    told: dict[str, list[str]] = {}
    for text, expected in report.expect.items():
        told.setdefault(expected.outcome, []).extend(releases_of(text, report.report))
    bad, good = (
        "; ".join(f"{outcome} {spans(names)}" for outcome, names in told.items() if (outcome in GOOD) == wanted)
        for wanted in (False, True)
    )
    return bad, good


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
