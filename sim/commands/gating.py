"""What gates have in common: `--baseline`, `--junit`, and what is said of a gate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.options import check_output, conclude, write_output
from kvcover.sim.errors import InputError, TierError

if TYPE_CHECKING:
    from kvcover.sim.results.gate import Cell
    from kvcover.sim.results.result import Result
    from kvcover.sim.results.verdict import Verdict

_SHOWN = 20


def junit_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--junit`, which writes verdicts for a CI to show."""
    return click.option("--junit", metavar="FILE", help="Write one test case a run as JUnit XML, for a CI to show.")(function)


def baseline_option(what: str, metavar: str = "FILE|R") -> Callable[..., Any]:
    """`--baseline`."""
    return click.option("--baseline", metavar=metavar, help=what)


def refuse_both(baseline: str | None, check: bool) -> None:
    """Raise InputError if --baseline and --check are given: the one passes what is bad in both, the other fails on it."""
    if baseline is not None and check:
        raise InputError("--check", "fails on all that is bad, and --baseline only on what is worse", "leave out one of the two")


def check_outputs(output: str | None, junit: str | None, *inputs: object) -> None:
    """Complain before a long run about files that can't be written, are read by it, or are one and the same."""
    check_output(output, *inputs)
    check_output(junit, *inputs, option="--junit")
    if junit is not None and output is not None and os.path.realpath(junit) == os.path.realpath(output):
        raise InputError("--junit", f"{junit!r} is where -o writes", "name another file")


def write_junit(path: str | None, suite: str, cells: Sequence[Cell], whole: Verdict) -> None:
    """Write the JUnit file, if one was asked for."""
    if path is not None:
        from kvcover.sim.results.junit import junit

        write_output(path, junit(suite, cells, whole), "--junit")


def conclude_lost(found: Iterable[Result | TierError], what: str) -> None:
    """Exit as of something inconclusive if the machine could not run something; all that it could is shown and written by now."""
    from kvcover.sim.results.verdict import together

    if not_run := [str(each) for each in found if isinstance(each, TierError)]:
        conclude(together([], what, not_run))


def show_gate(cells: Sequence[Cell], baseline: str, err: bool = False) -> None:
    """What a gate with a baseline found: what is worse, what is open, what is better; one line sums it up."""
    from kvcover.sim.results.gate import first_of

    ran = [cell for cell in cells if not cell.skipped]
    worse = [cell for cell in ran if cell.verdict.status == "fail"]
    unsettled = [cell for cell in ran if cell.verdict.status == "inconclusive" and not cell.verdict.idle]
    better = [cell for cell in ran if cell.better]
    _show(worse, "worse", lambda cell: first_of(cell.verdict.reasons), err)
    _show(unsettled, "open", lambda cell: first_of(cell.verdict.reasons), err)
    _show(better, "better", lambda cell: first_of(cell.better), err)
    otherwise = [cell for cell in ran if cell.otherwise]
    _show(otherwise, "as bad, but otherwise", lambda cell: first_of(cell.otherwise), err)
    as_before = sum(cell.as_before for cell in cells)
    counts = f"{len(worse)} worse, {len(unsettled)} open, {len(better)} better, {as_before} bad and no worse"
    counts += f" ({len(otherwise)} of them otherwise: look at these)" if otherwise else ""
    skipped = f", {len(cells) - len(ran)} skipped" if len(cells) > len(ran) else ""
    click.echo(f"beside {baseline}: {len(ran)} runs, {counts}{skipped}", err=err)


def _show(cells: Sequence[Cell], mark: str, text: Callable[[Cell], str], err: bool) -> None:
    for cell in cells[:_SHOWN]:
        click.echo(f"{mark}: {cell.name}: {text(cell)}", err=err)
    if len(cells) > _SHOWN:
        click.echo(f"and {len(cells) - _SHOWN} more {mark}", err=err)
