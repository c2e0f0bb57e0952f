"""What people see: tables that fit 80 columns, where words and not only colours say what is good."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcover.sim.cache.wrong import WrongCells, in_words
from kvcover.sim.releases.records import ALIASES, RELEASES
from kvcover.sim.results.keys import LegKeys, all_in_words
from kvcover.sim.results.result import GOOD, MEANING, OUTCOMES, RankCoverage, Remedies, Result, caught, mori_text, raced
from kvcover.sim.results.verdict import judge_cells, together

_STYLE = {"ok": "green", "refused": "cyan", "recomputed": "cyan", "failed": "yellow", "degraded": "yellow",
          "leak": "yellow", "hang": "magenta", "crash": "red", "corrupt": "bold red", "vacuous": "reverse"}  # fmt: skip
_MAX_RANK_ROWS = 16
_MOST_REMEDIES = 8


class _Plain(Console):
    """A console that prints what it is given: names may hold `[…]`, and addresses `::`, which rich takes for markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """As without rich: `kvcover.sim.cli` decides what a reader that went away means."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output; without colour and 80 columns wide when it is not a terminal."""
    out = _Plain()
    return out if out.is_terminal else _Plain(width=80, color_system=None)


def fraction(value: float | None) -> str:
    """A coverage as people read it: never 1.000 or 0.000 unless it is exactly that."""
    if value is None:
        return "–"
    if value in (0.0, 1.0):
        return f"{value:.1f}"
    return f"{min(max(value, 0.001), 0.999):.3f}".rstrip("0")


def outcome_text(outcome: str) -> Text:
    """The word, coloured where colours can be seen."""
    return Text(outcome, style=_STYLE[outcome])


def hanging(mark: str, text: str) -> Table:
    """A paragraph behind a mark; its further lines are indented as the first."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark), Text(text))
    return grid


def show_matrix(results: list[Result]) -> None:
    """One table a mode, prefill TP down, decode TP across, then the line that sums it up."""
    out = console()
    for mode in dict.fromkeys(result.mode for result in results):
        _show_mode(out, [result for result in results if result.mode == mode])
    if any(r.outcome == "vacuous" for r in results):
        out.print(f"vacuous: {MEANING['vacuous']}")
    out.print(summary_line(results))
    bad = [r for r, (_, verdict) in zip(results, judge_cells(results), strict=True) if verdict.status == "fail"]
    if bad:
        worst = max(bad, key=lambda r: OUTCOMES.index(r.outcome))
        out.print(f"{_worst(worst)}; see it with", soft_wrap=True)
        out.print(f"  {worst.replay}", soft_wrap=True)


def _worst(result: Result) -> str:
    """What is worst in a matrix."""
    if result.outcome not in GOOD:
        return f"worst: {result.outcome} ({MEANING[result.outcome]})"
    if raced(result.checks):
        return "race: nothing but time orders what decode uses, or an engine frees"
    return "worst: " + ", ".join(f"{check.name} failed" for check in result.checks if check.verdict == "fail")


def summary_line(results: list[Result]) -> str:
    """What a matrix found, in one line: the judge's verdict, and outcomes by mode."""
    verdicts = judge_cells(results)
    whole, bad = together(verdicts, "pairings"), sum(verdict.status == "fail" for _, verdict in verdicts)
    said = {
        "pass": "every pairing is good",
        "fail": f"{bad} of {len(results)} pairings are not good",
        "inconclusive": f"nothing is shown, as {whole.text}",
    }
    parts = []
    for mode in dict.fromkeys(result.mode for result in results):
        mine = [result for result in results if result.mode == mode]
        counts = Counter(result.outcome for result in mine)
        told = [f"{counts[o]} {o}" for o in (*OUTCOMES, "vacuous") if counts[o]]
        races = sum(raced(result.checks) for result in mine)
        told += [f"{races} with a race"] if races else []
        failed = sum(result.outcome in GOOD and _fails(result) for result in mine)
        told += [f"{failed} with a failed check"] if failed else []
        parts.append(f"{mode.upper()} {', '.join(told)}")
    return f"{_releases(results[0])}: {said[whole.status]} ({'; '.join(parts)})"


def _fails(result: Result) -> bool:
    """Whether a check failed besides the one on races."""
    return any(check.verdict == "fail" and check.name != "no-race" for check in result.checks)


def matrix_markdown(results: list[Result]) -> str:
    """The same as Markdown: one table a mode, what ran, and the line that sums it up."""
    lines = []
    for mode in dict.fromkeys(result.mode for result in results):
        mine = [result for result in results if result.mode == mode]
        first, columns = mine[0], list(dict.fromkeys(result.decode["tp"] for result in mine))
        lines += [f"**{mode.upper()}**, vLLM {_releases(first)}, {first.model}, {first.tier} tier: coverage and outcome", ""]
        lines += ["| P \\ D | " + " | ".join(f"TP{tp}" for tp in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for prefill in dict.fromkeys(result.prefill["tp"] for result in mine):
            cells = {r.decode["tp"]: f"{fraction(r.coverage)} {r.outcome}{_race(r)}" for r in mine if r.prefill["tp"] == prefill}
            row = [cells.get(tp, "not run") for tp in columns]
            lines.append(f"| TP{prefill} | " + " | ".join(row) + " |")
        lines.append("")
    backend = results[0].backend
    if backend:
        trees = backend.get("prefill_vllm"), backend.get("decode_vllm")
        lines.append(f"{mori_text(backend)}; connector files: {_hashes(trees)}")
    return "\n".join([*lines, summary_line(results)])


def _hashes(trees: tuple[object, object]) -> str:
    """The hash of each side's connector files, once if they are the same."""
    found = dict.fromkeys(str(tree.get("connector_sha256")) for tree in trees if isinstance(tree, dict))
    return ", ".join(found) or "unknown"


def _show_mode(out: Console, results: list[Result]) -> None:
    first = results[0]
    columns = list(dict.fromkeys(result.decode["tp"] for result in results))
    cells = {(result.prefill["tp"], result.decode["tp"]): result for result in results}
    per_table = max(1, (min(out.width, 120) - 10) // 13)
    for start in range(0, len(columns), per_table):
        part = columns[start : start + per_table]
        out.print(
            f"{first.mode.upper()}, {_releases(first)}, {first.model}, {first.tier} tier: coverage and outcome",
            soft_wrap=True,
        )
        table = Table()
        table.add_column("P \\ D", no_wrap=True)
        for decode in part:
            table.add_column(f"TP{decode}", no_wrap=True)
        for prefill in dict.fromkeys(result.prefill["tp"] for result in results):
            row: list[Text] = [Text(f"TP{prefill}")]
            for decode in part:
                result = cells.get((prefill, decode))
                if result is None:
                    row.append(Text("not run"))
                    continue
                row.append(Text(fraction(result.coverage) + "\n").append_text(outcome_text(result.outcome)).append(_race(result)))
            table.add_row(*row, end_section=True)
        out.print(table)


def _race(result: Result) -> str:
    """What a good outcome owes to luck."""
    return ", race" if result.outcome in GOOD and raced(result.checks) else ""


def _releases(result: Result) -> str:
    if result.decode_release == result.release:
        return result.release
    return f"{result.release} → {result.decode_release}"


def _router(result: Result) -> str:
    """The router; a release's own proxy goes by the last release that had the same, which would read like two releases."""
    release = RELEASES.get(ALIASES.get(result.release, result.release))
    return "its toy-proxy" if release is not None and release.toy_proxy == result.router else result.router


def show_result(result: Result) -> None:
    """One run: the verdict, each rank, the sets, the findings with their causes, and how to run it again."""
    out = console()
    head = Text(f"{result.mode.upper()} {_engine('P', result.prefill)} → {_engine('D', result.decode)}, vLLM {_releases(result)}, "
                f"{result.model}, {_router(result)}, {result.tier} tier\n")  # fmt: skip
    head.append_text(outcome_text(result.outcome)).append(f"{_race(result)}: {MEANING[result.outcome]}\n")
    went = any(check.name == "coverage-at-go" and check.verdict != "unknown" for check in result.checks)
    at_go = f"coverage {fraction(result.coverage)} at go, " if went else "no go; coverage "
    head.append(f"{at_go}{fraction(result.coverage_end)} at the end, "
                f"wrong {fraction(result.wrong)}, stray cells {'unknown' if result.stray is None else result.stray}")  # fmt: skip
    out.print(head)
    out.print(_rank_table(result))
    sets = result.sets
    for name, members in (
        ("needed", sets.needed), ("written", sets.written), ("told", sets.told),
        ("prefill told", sets.prefill_told), ("prefill released", sets.prefill_released),
    ):  # fmt: skip
        out.print(f"{name:>16}: {_members(members)}")
    show_findings(result)
    for line in caught(result):
        out.print(hanging("! ", line + "; -v shows where"))
    for fault in result.faults:
        if not fault.fired:
            out.print(Text(f"! {fault.fault} never fired", style="reverse"))
    failed = [check.name for check in result.checks if check.verdict == "fail"]
    unknown = [check.name for check in result.checks if check.verdict == "unknown"]
    passed = len(result.checks) - len(failed) - len(unknown)
    out.print(f"checks: {passed} passed, {len(failed)} failed{_names(failed)}, {len(unknown)} unknown{_names(unknown)}")
    if result.digest:
        out.print(f"digest {result.digest}, {result.events} events, {(result.virtual_ns or 0) / 1e6:g} ms of virtual time")
    if result.backend:
        timers = ", ".join(f"{name} {value:g} s" for name, value in (result.backend.get("timers_s") or {}).items())
        memory = f", caches in {device}" if (device := result.backend.get("device", "cpu")) != "cpu" else ""
        out.print(f"{mori_text(result.backend)}{memory}; the connector's timers: {timers or 'its own'}")
    out.print("replay: " + result.replay, soft_wrap=True)


def show_forensics(result: Result) -> None:
    """What a real run kept for whoever looks for the line at fault."""
    out, backend = console(), result.backend or {}
    legs = msgspec.convert(backend.get("keys", []), list[LegKeys])
    if not legs:
        out.print("keys: nobody saw which were read")
    for leg in legs:
        for line in all_in_words(leg):
            out.print(hanging("keys: ", line))
    for cells in msgspec.convert(backend.get("wrong_cells", []), list[WrongCells]):
        for line in [in_words(cells.kinds), *cells.first]:
            out.print(hanging(f"{cells.rank}, request {cells.request}, wrong: ", line))
    for each in backend.get("tracebacks", []):
        out.print(hanging(f"{each['rank']}, {each['effect']}: ", each["traceback"].rstrip()))
    for line in backend.get("log_tail", []):
        out.print(hanging("log: ", line))


def show_findings(result: Result) -> None:
    """The findings with their causes and, if they were put to the test, what that showed and what makes the run better."""
    out = console()
    for finding in result.findings:
        out.print(hanging("- ", finding.text))
        for number, cause in enumerate(finding.causes):
            shown = f" [{finding.shown[number]}]" if finding.shown else ""
            out.print(hanging("    ← ", cause + shown))
    if isinstance(result.remedies, Remedies):
        _show_remedies(out, result.remedies)


def _show_remedies(out: Console, told: Remedies) -> None:
    """What heals, with its command, then what mitigates, as far as it fits a screen."""
    where = "all" if told.layers == told.of_layers else f"{told.layers} of {told.of_layers}"
    pairs = f" and {told.pairs} pairs" if told.pairs else ""
    out.print(f"{told.tried} flips{pairs} on {where} layers in {told.seconds:.1f} s; what heals is proven on all layers")
    for effect in ("heals", "mitigates"):
        found = [remedy for remedy in told.found if remedy.effect == effect]
        for remedy in found[:_MOST_REMEDIES]:
            came = "" if effect == "heals" else f" ({remedy.outcome}, coverage {fraction(remedy.coverage)})"
            out.print(hanging(f"{effect}: ", " and ".join(remedy.flips) + came))
            if effect == "heals":
                out.print(f"    {remedy.command}", soft_wrap=True)
        if len(found) > _MOST_REMEDIES:
            out.print(f"{len(found) - _MOST_REMEDIES} more that {effect.removesuffix('s')}: --json")
    if not any(remedy.effect == "heals" for remedy in told.found):
        here = "nothing found heals it" if told.pairs else "nothing heals it alone; pairs are tried with --budget SECONDS"
        out.print(f"{here}; other releases, routers and sizes by `kvcover diagnose`", soft_wrap=True)


def _engine(letter: str, size: dict[str, int]) -> str:
    several = f"{size['instances']} × " if "instances" in size else ""
    return f"{letter} {several}TP{size['tp']}" + (f" DP{size['dp']}" if size["dp"] > 1 else "")


def _names(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _members(names: list[str] | None) -> str:
    if names is None:
        return "unknown"
    if not names:
        return "nobody"
    return " ".join(names) if len(names) <= 16 else f"{' '.join(names[:16])} and {len(names) - 16} more"


def _rank_table(result: Result) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("decode rank", "covered", "wrong", "missing", "told"):
        table.add_column(column, justify="left" if column in ("decode rank", "told") else "right")
    for rank in result.by_rank[:_MAX_RANK_ROWS]:
        table.add_row(_rank_name(result, rank), fraction(rank.coverage), fraction(rank.wrong), fraction(rank.missing),
                      {True: "yes", False: "no", None: "–"}[rank.told])  # fmt: skip
    if len(result.by_rank) > _MAX_RANK_ROWS:
        table.add_row(f"{len(result.by_rank) - _MAX_RANK_ROWS} more: --json")
    return table


def _rank_name(result: Result, rank: RankCoverage) -> str:
    return f"D{rank.dp}.{rank.tp}" if result.decode["dp"] * result.decode.get("instances", 1) > 1 else f"D{rank.tp}"
