"""`kvcover router keys`: what one bad key does, key by key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.options import check_output, modes_of, release_list, write_output

if TYPE_CHECKING:
    from kvcover.sim.search.keys import KeyCase, KeyOutcome

    Row = tuple[KeyCase, KeyOutcome | None]


@click.command("keys")
@click.option("--release", metavar="R,R,…", help="vLLM releases (default: newest), or all.")
@click.option("--router", default="toy-proxy", show_default=True, metavar="NAME|FILE", help="Whose legs have the bad key.")
@click.option("--mode", default="both", show_default=True, metavar="write|read|both", help="Transfer modes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a case.")
@click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well.")
def command(release: str | None, router: str, mode: str, as_json: bool, output: str | None) -> None:
    """Say what one bad key of one leg does: missing, null, of a wrong type, untrue, stale, or another request's.

    Played on the model with P TP2, D TP2 and a small MLA model. The first request has the bad key, healthy ones come after it:
    what is bad for them too is bad `for everybody`.
    """
    from kvcover.sim.progress import each as progress
    from kvcover.sim.releases.records import NEWEST
    from kvcover.sim.search.keys import key_cases, run_case

    check_output(output, router)
    cases = [case for name in release_list(release or NEWEST) for way in modes_of(mode) for case in key_cases(name, way, router)]
    rows: list[Row] = [(case, run_case(case)) for case in progress(cases, "cases")]
    lines = "".join(json.dumps(_line(case, outcome)) + "\n" for case, outcome in rows)
    write_output(output, lines)
    if as_json:
        click.echo(lines, nl=False)
    else:
        _show(rows)


def _line(case: KeyCase, outcome: KeyOutcome | None) -> dict[str, object]:
    from kvcover.sim.simulate import replay_line

    return {
        "release": case.release,
        "mode": case.mode,
        "leg": case.leg,
        "key": case.key,
        "trouble": case.trouble,
        "read": case.read,
        "fault": case.fault,
        "outcome": None if outcome is None else outcome.outcome,
        "everybody": None if outcome is None else outcome.everybody,
        "command": "" if outcome is None or case.scenario is None else replay_line(case.scenario),
    }


_IF = {"missing": "missing", "null": "null", "wrong type": "of a wrong type", "wrong value": "untrue", "stale": "stale",
       "other": "another request's"}  # fmt: skip


def _show(rows: Sequence[Row]) -> None:
    """A paragraph a key, by release, mode and leg: what comes of it, the worst first."""
    from rich.text import Text

    from kvcover.sim.results.show import console, hanging
    from kvcover.sim.search.keys import TROUBLES

    out = console()
    legs: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for case, outcome in rows:
        legs.setdefault((case.release, case.mode, case.leg), {}).setdefault(case.key, []).append((case, outcome))
    for (release, mode, leg), keys in legs.items():
        out.print(Text(f"{release}, {mode.upper()}, {leg} leg", style="bold"))
        alike: dict[str, list[str]] = {}
        for key, mine in keys.items():
            unread = "" if mine[0][0].read else ", for which nobody asks"
            alike.setdefault(f"{unread}: {_said(mine)}", []).append(key)
        for text, names in alike.items():
            out.print(hanging("  ", f"{', '.join(names)}{text}"))
    for line in (
        *(f"{_IF[trouble]}: {text}" for trouble, text in TROUBLES.items()),
        "for everybody: requests that come after it, or are under way, end badly as well",
        "the model's word; `--json` has the command that shows each case, and docs/routers.md what was measured",
    ):
        out.print(hanging("  ", line))


def _said(rows: Sequence[Row]) -> str:
    from kvcover.sim.results.result import OUTCOMES

    found: dict[tuple[int, bool], list[str]] = {}
    for case, outcome in rows:
        if outcome is not None:
            found.setdefault((OUTCOMES.index(outcome.outcome), outcome.everybody), []).append(_IF[case.trouble])
    clauses = []
    for (rank, everybody), troubles in sorted(found.items(), reverse=True):
        clauses.append(f"{OUTCOMES[rank]}{' for everybody' if everybody else ''} if {_or(troubles)}")
    return "; ".join(clauses)


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
