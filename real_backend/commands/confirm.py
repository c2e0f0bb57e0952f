"""`kvcover confirm`: does one release repair what another breaks?"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from kvcover.sim.commands.options import check_output, scenario_data, scenario_options, sizes, write_output
from kvcover.sim.errors import InputError


@click.command("confirm")
@click.argument("scenario", required=False)
@click.option("--before", required=True, metavar="R|PATH|installed", help="The vLLM that should be bad.")
@click.option("--after", required=True, metavar="R|PATH|installed", help="The vLLM that should be good.")
@click.option("--mode", metavar="write|read", help="Prefill pushes (default) or decode pulls.")
@click.option("--prefill", metavar="tp=N[,dp=N]", help="Size of the prefill engine.")
@click.option("--decode", metavar="tp=N[,dp=N]", help="Size of the decode engine.")
@scenario_options
def command(scenario: str | None, before: str, after: str, **options: Any) -> None:
    """Run one scenario on two vLLMs: CONFIRMED if it is bad before and good after, and every planned fault fired.

    Exit code 0 if confirmed, 1 if not, 3 if nothing can be concluded. -o writes the evidence: the scenario and its hash, all
    versions, both results and the end of both logs. Example:

    \b
      kvcover confirm --before 0.26.0 --after 0.27.0 --tier connector --prefill tp=8 --decode tp=8 --model deepseek-v3
    """
    check_output(options["output"])
    for name in ("release", "decode_release", "vllm"):
        if options[name] is not None:
            raise InputError(f"--{name.replace('_', '-')}", "two vLLMs are named already", "use --before and --after alone")
    data = scenario_data(scenario, options)
    for name in ("release", "decode_release"):
        data.pop(name, None)  # a scenario's own releases give way
    if options["mode"] is not None:
        data["mode"] = options["mode"]
    for name in ("prefill", "decode"):
        if found := sizes(f"--{name}", options[name]):
            data[name] = {**(data.get(name) or {}), **found}
    from kvcover.real_backend.evidence.confirm import CONFIRMED, INCONCLUSIVE, confirm

    done = confirm(data, before, after, options["tier"])
    evidence = json.dumps(done.evidence(), ensure_ascii=False)
    write_output(options["output"], evidence + "\n")
    if options["as_json"]:
        click.echo(evidence)
    else:
        mori = done.evidence()["mori"]
        click.echo(f"{done.verdict}: {done.reason}")
        click.echo(f"{done.before.tier} tier" + (f", {mori} mori.io" if mori else "") + f", scenario sha256 {done.sha256[:16]}")
        for when, result in (("before", done.before), ("after", done.after)):
            click.echo(f"{when:>7}: {result.replay}")
        if options["output"]:
            click.echo(f"evidence: {options['output']}")
    if done.verdict != CONFIRMED:
        sys.exit(3 if done.verdict == INCONCLUSIVE else 1)
