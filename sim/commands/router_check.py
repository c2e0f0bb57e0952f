"""`kvcover router check`: a router's legs against releases, key by key."""

from __future__ import annotations

import json
from typing import Any

import click

from kvcover.sim.commands.options import build_scenario, check_output, conclude, release_list, sizes, write_output
from kvcover.sim.errors import InputError, nearest


@click.command("check")
@click.argument("legs", metavar="LEGS|-")
@click.option("--release", metavar="R,R,…", help="vLLM releases to check against (default: newest), or all.")
@click.option("--prefill", default="tp=1", show_default=True, metavar="tp=N[,dp=N[,pods=N]]", help="Size of the prefill engine.")
@click.option("--decode", default="tp=1", show_default=True, metavar="tp=N[,dp=N[,pods=N]]", help="Size of the decode engine.")
@click.option("--mode", metavar="write|read", help="The mode of legs that don't say theirs.")
@click.option("--model", metavar="M", help="Preset, config.json, or numbers, as for `kvcover run`.")
@click.option(
    "--legs-out", metavar="FILE", help="Write the legs that work, a file for --router, if one pair does for all releases."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a mode and release.")
@click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well.")
@click.option("--check", is_flag=True, help="Exit with 1 if the legs are wrong in any mode or release.")
def command(legs: str, release: str | None, **options: Any) -> None:
    """Say key by key who reads a router's legs, what is missing, what nobody reads, and what comes of it; and legs that work.

    LEGS is a file with both legs or one of them as they were sent, a log that holds them, or - for standard input
    (docs/routers.md). Nothing is run but the model.
    """
    from kvcover.sim.releases.records import NEWEST
    from kvcover.sim.scenario.legs_file import parse_legs, read_text
    from kvcover.sim.search.legs_check import check_legs, startable

    mode = options["mode"]
    if mode not in (None, "write", "read"):
        raise InputError("--mode", f"no mode {mode!r}", nearest(mode, ("write", "read")))
    for option, path in (("-o", options["output"]), ("--legs-out", options["legs_out"])):
        check_output(path, legs, options["model"], option=option)
    releases = release_list(release or NEWEST)
    sides: dict[str, Any] = {side: sizes(f"--{side}", options[side]) for side in ("prefill", "decode")}
    scenario = build_scenario(sides | ({"model": options["model"]} if options["model"] else {}))
    own = parse_legs(read_text(legs), legs, mode)
    apart = startable(scenario)
    verdicts = check_legs(own, apart, releases, legs)
    lines = "".join(json.dumps(verdict.to_dict(), ensure_ascii=False) + "\n" for verdict in verdicts)
    write_output(options["output"], lines)
    if options["legs_out"] is not None:
        from kvcover.sim.search.legs_check import legs_as_file

        write_output(options["legs_out"], json.dumps(legs_as_file(verdicts), indent=1) + "\n", "--legs-out")
    if options["as_json"]:
        click.echo(lines, nl=False)
    else:
        from kvcover.sim.commands.show_check import show_check

        show_check(verdicts, own.notes, apart, moved=apart != scenario)
    if options["check"]:
        from kvcover.sim.results.verdict import together

        conclude(together([(f"{each.mode} {each.release}", each.judged) for each in verdicts], "modes and releases"))
