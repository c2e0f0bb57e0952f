"""`kvcover diagnose`: from what an operator has to causes and repairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.options import build_scenario, check_output, write_output

if TYPE_CHECKING:
    from kvcover.sim.scenario.legs_file import OwnLegs
    from kvcover.sim.search.diagnose import Cause


@click.command("diagnose")
@click.option("--prefill", required=True, metavar="COMMAND", help="The `vllm serve` command line of prefill, in quotes.")
@click.option("--decode", required=True, metavar="COMMAND", help="The `vllm serve` command line of decode, in quotes.")
@click.option("--release", metavar="R", help="vLLM release of both engines (default: newest).")
@click.option("--decode-release", metavar="R", help="Another release for decode.")
@click.option("--leg", metavar="TEXT|FILE|-", help="One logged kv_transfer_params, or both, as text, in a file, or on stdin.")
@click.option(
    "--seen", required=True, metavar="WHAT", help="accuracy (too low), hang, crash, error, slow, memory, or the line of a crash."
)
@click.option("--model", metavar="M", help="The model, if its name is no preset's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a cause.")
@click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well.")
def command(
    prefill: str, decode: str, release: str | None, decode_release: str | None, leg: str | None, seen: str, model: str | None,
    as_json: bool, output: str | None,
) -> None:  # fmt: skip
    """Say what may be behind what was seen, on the model: causes that come to the same, and what repairs each.

    A cause is told only if a run of it looks as what was seen, and a repair only if a run with it is good; the command that
    shows it stands below each.
    """
    import msgspec

    from kvcover.sim.scenario.serve import scenario_of_serve
    from kvcover.sim.search.diagnose import diagnose

    check_output(output, leg)
    fields, notes = scenario_of_serve(prefill, decode, model)
    fields |= {name: value for name, value in (("release", release), ("decode_release", decode_release)) if value}
    scenario = build_scenario(fields | {"fabric": "loopback"})
    causes = diagnose(scenario, _legs(leg, scenario.mode), seen)
    lines = "".join(json.dumps(msgspec.to_builtins(cause), ensure_ascii=False) + "\n" for cause in causes)
    write_output(output, lines)
    if as_json:
        click.echo(lines, nl=False)
    else:
        _show(causes, notes, seen)


def _legs(leg: str | None, mode: str) -> OwnLegs | None:
    from kvcover.sim.scenario.legs_file import is_file, parse_legs, read_text

    if leg is None:
        return None
    text = leg if leg != "-" and not is_file(leg) and "{" in leg else read_text(leg)
    return parse_legs(text, "--leg", mode)


def _show(causes: Sequence[Cause], notes: Sequence[str], seen: str) -> None:
    from rich.text import Text

    from kvcover.sim.results.show import console, fraction, hanging, outcome_text

    out = console()
    for note in notes:
        out.print(hanging("  ", note))
    if not causes:
        out.print(hanging("", f"nothing that kvcover models looks like {seen!r} here; `kvcover explore` searches further"))
    for number, cause in enumerate(causes, 1):
        head = Text(f"{number}. {cause.assumed or 'as it was started'}: ", style="bold")
        out.print(head + outcome_text(cause.outcome if cause.outcome != "race" else "ok")
                  + Text(f"{', race' if cause.outcome == 'race' else ''}, coverage {fraction(cause.coverage)}"))  # fmt: skip
        for finding in cause.findings[:3]:
            out.print(hanging("   - ", finding.text))
            for index, text in enumerate(finding.causes):
                shown = finding.shown[index] if index < len(finding.shown) else ""
                out.print(hanging("     ← ", text + (f" ({shown})" if shown else "")))
        for repair in cause.repairs:
            out.print(hanging("   heals: ", repair.text))
            out.print(f"     {repair.command}", soft_wrap=True)
        if not cause.repairs:
            out.print("   nothing that was tried heals it")
        out.print(f"   see it: {cause.command}", soft_wrap=True)
