"""`kvcover replay`: a failure that `kvcover explore` found, once more."""

from __future__ import annotations

import sys

import click

from kvcover.sim.commands.options import build_scenario, conclude
from kvcover.sim.errors import InputError


@click.command("replay")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(file: str, as_json: bool) -> None:
    """Run a scenario file that `kvcover explore` wrote and say whether the same comes of it.

    Exits with 1 when the result is not what the file expects, or when its digest is not the one in the file's comments.
    """
    from kvcover.sim.files import MB, read_text
    from kvcover.sim.results.verdict import fail, inconclusive, judge_expected
    from kvcover.sim.scenario.scenario import Expect, load
    from kvcover.sim.search.example import stored_digest
    from kvcover.sim.simulate import run

    scenario = build_scenario(load(file))
    stored = stored_digest(read_text(file, MB, "give a scenario file"))
    try:
        result = run(scenario)
    except InputError:
        raise
    except Exception:
        import traceback

        click.echo(traceback.format_exc() + f"kvcover: {file} makes the model itself fail: report it", err=True)
        sys.exit(1)
    if as_json:
        click.echo(result.to_json())
    else:
        from kvcover.sim.results.show import show_result

        show_result(result)
    verdict = judge_expected(result, scenario.expect or Expect())
    if verdict.passed and stored is not None and stored != result.digest:
        verdict = fail(f"the digest is {result.digest}, in {file} it is {stored}: another history, so another program or scenario")
    if verdict.passed and stored is None and scenario.expect in (None, Expect()):
        verdict = inconclusive(f"{file} expects nothing and holds no digest, so there is nothing to compare with")
    conclude(verdict, "replay differs")
    click.echo("replay agrees" + ("" if stored else "; the file holds no digest to compare with"), err=True)
