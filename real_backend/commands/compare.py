"""`kvcover compare`: two result files side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.errors import plain

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result

_SHOWN = 3


@click.command("compare")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help="Show what is equal as well.")
@click.option("--check", is_flag=True, help="Exit with 1 if they differ in outcome, coverage, sets or checks.")
def command(first: str, second: str, everything: bool, check: bool) -> None:
    """Put two results of `kvcover run -o FILE` side by side; ≠ marks what differs. Of two matrices, cell by cell.

    --check also fails where one file has a cell that the other lacks. What became worse, and only that, is what
    `kvcover matrix --baseline FILE` fails on.
    """
    from kvcover.real_backend.evidence.compare import read_named

    one, two = read_named(first), read_named(second)
    alone = len(one) == len(two) == 1
    differ = _one(next(iter(one.values())), next(iter(two.values())), everything) if alone else _many(one, two, everything)
    if check:
        from kvcover.sim.commands.options import conclude
        from kvcover.sim.results.verdict import PASS, fail, inconclusive

        moot = [place for place, found in ((first, one), (second, two)) if any(r.outcome == "vacuous" for r in found.values())]
        unclear = inconclusive(f"in {moot[0]} a planned fault never fired, so it proves nothing") if moot else PASS
        conclude(fail(f"{first} and {second} differ") if differ else unclear)


def _one(first: Result, second: Result, everything: bool) -> bool:
    from kvcover.real_backend.evidence.compare import compare, seen

    lines = compare(first, second)
    shown = [line for line in lines if line.differs or everything or line.name in ("tier", "release", "outcome", "coverage")]
    width = max(len(line.name) for line in shown)
    column = min(40, max(len(_text(line.first)) for line in shown))
    for line in shown:
        row = f"{'≠' if line.differs else ' '} {line.name:<{width}}  {_text(line.first):<{column}}  {_text(line.second)}"
        click.echo(plain(row.rstrip()))
    differ = seen(lines)
    click.echo(f"{len(differ)} differences" if differ else "no difference in what was seen")
    return bool(differ)


def _many(first: dict[str, Result], second: dict[str, Result], everything: bool) -> bool:
    """One line a cell: what both say of outcome and coverage, and in which other fields they differ."""
    from kvcover.real_backend.evidence.compare import compare, seen

    count = 0
    names = list(dict.fromkeys([*first, *second]))
    width = max(map(len, names))
    for name in names:
        one, two = first.get(name), second.get(name)
        if one is None or two is None:
            count += 1
            click.echo(f"≠ {plain(name):<{width}}  only in {'A' if two is None else 'B'}")
            continue
        differ = seen(compare(one, two))
        count += bool(differ)
        if differ or everything:
            said = [f"{line.name} {_text(line.first)} → {_text(line.second)}" for line in differ[:_SHOWN]]
            more = f", and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
            told = ", ".join(said) + more if differ else f"{one.outcome} {_text(one.coverage)}"
            click.echo(plain(f"{'≠' if differ else ' '} {name:<{width}}  {told}"))
    click.echo(f"{count} of {len(names)} cells differ" if count else f"no difference in what was seen in {len(names)} cells")
    return count > 0


def _text(value: Any) -> str:
    return plain(_words(value))


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nobody"
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
