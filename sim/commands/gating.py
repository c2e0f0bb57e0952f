"""What gates have in common: `--baseline`, `--junit`, what is said of a gate, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.options import inconclusive, write_output

if TYPE_CHECKING:
    from kvcover.sim.results.gate import Cell, Gate, Verdict
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import Expect

_SHOWN = 20


def junit_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--junit`, which writes verdicts for a CI to show."""
    return click.option("--junit", metavar="FILE", help="Write one test case a run as JUnit XML, for a CI to show.")(function)


def baseline_option(what: str, metavar: str = "FILE|R") -> Callable[..., Any]:
    """`--baseline`."""
    return click.option("--baseline", metavar=metavar, help=what)


def alone(_name: str, result: Result, expect: Expect | None = None) -> tuple[Verdict, str]:
    """The verdict of one run without a baseline: good, and as expected."""
    from kvcover.sim.results.expect import disagreement

    problem = disagreement(result, expect, check=True)
    if not problem:
        return "pass", ""
    return ("inconclusive" if result.outcome == "vacuous" else "fail"), problem


def cell_of(name: str, result: Result, expect: Expect | None) -> Cell:
    """The cell of a run that is alone."""
    from kvcover.sim.results.expect import unproven
    from kvcover.sim.results.gate import gate

    return gate({name: result}, None, lambda name, result: alone(name, result, expect), unproven).cells[0]


def write_junit(path: str | None, suite: str, cells: Sequence[Cell]) -> None:
    """Write the JUnit file, if one was asked for."""
    if path is not None:
        from kvcover.sim.results.junit import junit

        write_output(path, junit(suite, cells), "--junit")


def show_gate(gate: Gate, baseline: str, err: bool = False) -> None:
    """What a gate with a baseline found: what is worse, what is open, what is better; one line sums it up."""
    from kvcover.sim.results.gate import first_of

    for verdict, mark in (("fail", "worse"), ("inconclusive", "open"), ("skipped", "skipped")):
        _show(gate.of(verdict), mark, lambda cell: cell.reason, err)  # type: ignore[arg-type]
    better = [cell for cell in gate.cells if cell.better]
    _show(better, "better", lambda cell: first_of(cell.better), err)
    counts = f"{len(gate.of('fail'))} worse, {len(gate.of('inconclusive'))} open, {len(better)} better"
    as_before = sum(cell.as_before for cell in gate.cells)
    skipped = f", {len(gate.of('skipped'))} skipped" if gate.of("skipped") else ""
    click.echo(f"beside {baseline}: {len(gate.cells)} runs, {counts}, {as_before} bad and no worse{skipped}", err=err)


def _show(cells: Sequence[Cell], mark: str, text: Callable[[Cell], str], err: bool) -> None:
    for cell in cells[:_SHOWN]:
        click.echo(f"{mark}: {cell.name}: {text(cell)}", err=err)
    if len(cells) > _SHOWN:
        click.echo(f"and {len(cells) - _SHOWN} more {mark}", err=err)


def end(gate: Gate) -> None:
    """Exit with 1 or 3 unless the gate passes."""
    if gate.verdict == "fail":
        click.echo(f"kvcover: check failed: {gate.reason}", err=True)
        sys.exit(1)
    if gate.verdict == "inconclusive":
        inconclusive(gate.reason)
