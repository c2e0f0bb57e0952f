"""`kvcover corpus`: public fault reports as scenarios, release by release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.gating import (
    baseline_option,
    check_outputs,
    conclude_lost,
    junit_option,
    refuse_both,
    show_gate,
    write_junit,
)
from kvcover.sim.commands.options import choose_mori, conclude, mori_option, progress_option, tier_option, write_output
from kvcover.sim.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from kvcover.sim.search.corpus import Case, Judged
    from kvcover.sim.search.corpus_gate import CorpusRun
    from kvcover.sim.tiers import Tier

# Four letters, so that ten releases fit a line.
_SHORT = {"ok": "ok", "refused": "refu", "recomputed": "reco", "failed": "fail", "degraded": "degr", "leak": "leak",
          "hang": "hang", "crash": "crsh", "corrupt": "corr", "vacuous": "vacu"}  # fmt: skip
_NAME, _CELL = 19, 6


@click.command("corpus")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--release", "releases", multiple=True, metavar="R", help="Only this release. Repeatable.")
@tier_option()
@click.option("--vllm", metavar="R|PATH|installed", help="The vLLM that a real tier runs; its release says what is expected.")
@mori_option
@baseline_option("Fail only where a run is worse than there: what -o wrote earlier, or a release, run as well.")
@junit_option
@progress_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run instead of tables.")
@click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well.")
@click.option("--check", is_flag=True, help="Exit with 1 if anything is not as expected.")
def command(
    names: tuple[str, ...],
    releases: tuple[str, ...],
    tier: str,
    vllm: str | None,
    mori: str | None,
    baseline: str | None,
    junit: str | None,
    as_json: bool,
    output: str | None,
    check: bool,
) -> None:
    """Run public fault reports on every release and say which are as bad, or as good, as they should be.

    NAME is the id of a report, such as vllm#47764; with names, each report is shown in full. With --baseline the exit code is 1
    if a run is worse than in the baseline, 3 if that can't be told of all, else 0.
    """
    refuse_both(baseline, check)
    check_outputs(output, junit, baseline)
    import msgspec

    from kvcover.sim.results.read import results_text
    from kvcover.sim.tiers import load_tier

    chosen = load_tier(tier)
    choose_mori(chosen, mori)
    wanted = _wanted(names, releases, vllm, chosen, baseline)
    found = _run(wanted, chosen, vllm, baseline)
    verdicts = found.judged
    lines = [msgspec.json.encode(verdict.to_dict()).decode() for verdict in verdicts]
    write_output(output, results_text(output, lines))
    if as_json:
        click.echo("".join(line + "\n" for line in lines), nl=False)
    elif verdicts:
        (_show_reports if names else _show_table)(verdicts)
        _show_sum(verdicts, len(found.skipped), tier)
    _end(found, baseline, junit, as_json, check)


def _wanted(names: tuple[str, ...], releases: tuple[str, ...], vllm: str | None, tier: Tier, baseline: str | None) -> list[Case]:
    """The cases that were asked for; complains about releases of which none is there, or of which one is needed."""
    from kvcover.sim.releases.records import NEWEST, get_release
    from kvcover.sim.search.corpus import cases, load_corpus, select

    wanted = select(load_corpus(), names)
    chosen = [get_release(name, "--release").name for name in releases]
    if vllm is not None and not chosen:
        chosen = [get_release(tier.release_of(vllm) or NEWEST, "--vllm").name]
    if (vllm is not None or baseline is not None) and len(chosen) != 1:
        option = "--vllm" if vllm is not None else "--baseline"
        raise InputError(option, "is for the cases of one release", f"name it, as with --release {NEWEST}")
    planned = list(cases(wanted, chosen))
    _refuse_unsaid(planned, chosen, [each.report for each in wanted] if names else [])
    return planned


def _refuse_unsaid(planned: list[Case], releases: list[str], reports: list[str]) -> None:
    """Raise InputError for a release or a report that was named, and of which nothing would be run."""
    of_releases, of_reports = {case.release for case in planned}, {case.report.report for case in planned}
    if missing := [name for name in releases if name not in of_releases]:
        raise InputError("--release", f"none of these reports says anything about {', '.join(missing)}", "name another release")
    if missing := [name for name in reports if name not in of_reports]:
        raise InputError("corpus", f"{', '.join(missing)} says nothing about {', '.join(releases)}", "name another release")


def _run(wanted: list[Case], tier: Tier, vllm: str | None, baseline: str | None) -> CorpusRun:
    from kvcover.sim.search.baseline import baseline_release
    from kvcover.sim.search.corpus_gate import read_baseline, run_corpus

    release = None if baseline is None else baseline_release(baseline)
    stored = read_baseline(baseline, wanted, tier) if baseline is not None and release is None else None
    return run_corpus(wanted, tier, vllm, release, stored)


def _end(found: CorpusRun, baseline: str | None, junit: str | None, as_json: bool, check: bool) -> None:
    """Say what is worse, write JUnit, and exit with what comes of it; without baseline and --check nobody asked."""
    from kvcover.sim.results.gate import verdict_of
    from kvcover.sim.results.verdict import inconclusive

    cells = found.cells()
    verdict = verdict_of(cells, "runs")
    if verdict.passed and found.skipped and baseline is None:
        verdict = inconclusive(f"{len(found.skipped)} of {len(cells)} runs were not run: {next(iter(found.skipped.values()))}")
    write_junit(junit, "kvcover corpus", cells, verdict)
    if baseline is not None:
        show_gate(cells, baseline, err=as_json)
    if baseline is not None or check:
        conclude(verdict)
    conclude_lost(found.now.values(), "runs")


def _mark(verdict: Judged) -> str:
    """`!` not as expected, `*` as expected and seen on the real connector too."""
    if verdict.problem:
        return "!"
    return "*" if verdict.case.expected.row else ""


def _show_table(verdicts: list[Judged]) -> None:
    """Reports and their variants down, releases across."""
    from rich.text import Text

    from kvcover.sim.releases.records import RELEASES
    from kvcover.sim.results.show import console

    out = console()
    columns = [name for name in RELEASES if any(v.case.release == name for v in verdicts)]
    head = [".".join(name.split(".")[:2]).rjust(_CELL - 1) + " " for name in columns]
    out.print(Text((" " * _NAME + "".join(head)).rstrip(), style="bold"))
    rows: dict[tuple[str, str], dict[str, Judged]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.case.report.report, verdict.case.variant), {})[verdict.case.release] = verdict
    for (report, variant), row in rows.items():
        line = Text(f"  {variant}".ljust(_NAME) if variant else report.ljust(_NAME), style="dim" if variant else "")
        for name in columns:
            line.append(_cell(row.get(name)))
        line.rstrip()
        out.print(line)
    seen = [name for name in _SHORT if any(v.result.outcome == name for v in verdicts)]
    out.print("! not as expected, * as expected and seen on the real connector too, · not said")
    out.print(", ".join(f"{_SHORT[name]} {name}" for name in seen if _SHORT[name] != name))


def _cell(verdict: Judged | None) -> Text:
    from rich.text import Text

    from kvcover.sim.results.show import outcome_text

    if verdict is None:
        return Text("·".rjust(_CELL - 1) + " ")
    word = _SHORT[verdict.result.outcome]
    style = "reverse" if verdict.problem else outcome_text(verdict.result.outcome).style
    return Text(" " * (_CELL - 1 - len(word))).append(word, style=style).append(_mark(verdict) or " ")


def _show_reports(verdicts: list[Judged]) -> None:
    """Each report in full: what was seen, why, and what every release makes of it."""
    from rich.text import Text

    from kvcover.sim.results.show import console, fraction, hanging
    from kvcover.sim.search.corpus import EVIDENCE, spans

    out, report, variant = console(), "", ""
    groups: dict[tuple[str, str, str, str, str], list[Judged]] = {}
    for v in verdicts:
        key = (v.case.report.report, v.case.variant, v.result.outcome, fraction(v.result.coverage), v.problem or _mark(v))
        groups.setdefault(key, []).append(v)
    for (name, of, outcome, coverage, problem), group in groups.items():
        case = group[0].case
        if name != report:
            out.print(Text(f"{name}  {case.report.title}", style="bold"))
            out.print(hanging("  ", case.report.url))
            out.print(hanging("  seen: ", case.report.seen))
            out.print(hanging("  evidence: ", f"{case.report.evidence}: {EVIDENCE[case.report.evidence]}"))
        if (name, of) != (report, variant):
            out.print(hanging(f"  {of or 'why'}: ", case.why))
        report, variant = name, of
        said = f"{outcome}, coverage {coverage}, {_verdict(group[0], problem)}"
        out.print(hanging(f"    {spans(v.case.release for v in group)}: ", said))


def _verdict(verdict: Judged, problem: str) -> str:
    from kvcover.sim.results.result import GOOD

    if verdict.problem:
        return f"NOT AS EXPECTED: {problem}"
    kind = "good" if verdict.result.outcome in GOOD else "bad"
    return f"{kind} as expected" + (", on the real connector too" if verdict.case.expected.row else "")


def _show_sum(verdicts: list[Judged], left_out: int, tier: str) -> None:
    from kvcover.sim.results.result import GOOD
    from kvcover.sim.results.show import console

    out = console()
    wrong = [v for v in verdicts if v.problem]
    bad = sum(v.result.outcome not in GOOD for v in verdicts if not v.problem)
    measured = sum(_mark(v) == "*" for v in verdicts)
    reports = len({v.case.report.report for v in verdicts})
    for v in wrong:
        out.print(f"! {v.case.name}: {v.problem}")
    good = len(verdicts) - len(wrong) - bad
    out.print(
        f"{reports} report{'s' * (reports > 1)}, {len(verdicts)} runs: {bad} bad and {good} good as expected, "
        f"{len(wrong)} not as expected; {measured} also on the real connector"
    )
    if left_out:
        out.print(f"{left_out} runs left out: tier {tier} can't inject their faults")
