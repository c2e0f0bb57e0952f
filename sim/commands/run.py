"""`kvcover run`: one scenario."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.gating import check_outputs, junit_option, write_junit
from kvcover.sim.commands.options import (
    build_scenario,
    causes_options,
    check_causes,
    check_output,
    choose_mori,
    conclude,
    scenario_data,
    scenario_options,
    sizes,
    write_output,
    write_trace,
)
from kvcover.sim.errors import InputError

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import Scenario
    from kvcover.sim.tiers import Tier


@click.command("run")
@click.argument("scenario", required=False)
@click.option("--mode", metavar="write|read", help="Prefill pushes (default) or decode pulls.")
@click.option("--prefill", metavar="tp=N[,dp=N[,pods=N]]", help="Size of the prefill engine.")
@click.option("--decode", metavar="tp=N[,dp=N[,pods=N]]", help="Size of the decode engine.")
@click.option("--keep", metavar="DIR", help="Leave all evidence in a new folder, also if it fails: logs, versions, a summary.")
@click.option(
    "--trace",
    metavar="FILE",
    help="Write every event as a timeline for Perfetto or chrome://tracing; a name in .jsonl: a line an event.",
)
@click.option("-v", "--verbose", is_flag=True, help="Of a real run: keys that were read of its legs, wrong cells, tracebacks.")
@junit_option
@causes_options
@scenario_options
def command(
    scenario: str | None,
    mode: str | None,
    prefill: str | None,
    decode: str | None,
    keep: str | None,
    trace: str | None,
    verbose: bool,
    junit: str | None,
    causes: bool,
    budget: float | None,
    **options: Any,
) -> None:
    """Run one scenario and say which KV cells decode got, who was told, and why.

    SCENARIO is a TOML or JSON file; every option overrides it. With `expect` the exit code is 1 if the result differs. Example:

    \b
      release = "0.26.0"
      mode = "write"
      model = "deepseek-v3"
      prefill = {tp = 8}
      decode = {tp = 8}
      faults = ["drop:remote_tp_size@prefill"]
      expect = {outcome = "corrupt", coverage = 0.125}
    """
    from kvcover.sim.results.result import MEANING
    from kvcover.sim.tiers import load_tier, refuse_options

    check_causes(causes, budget)
    tier = load_tier(options["tier"])
    refuse_options(tier, {"--causes": causes, "--verbose": verbose, "--vllm": options["vllm"]})
    choose_mori(tier, options["mori"])
    data = scenario_data(scenario, options)
    if mode is not None:
        data["mode"] = mode
    for name, text in (("prefill", prefill), ("decode", decode)):
        if found := sizes(f"--{name}", text):
            data[name] = {**data.get(name, {}), **found}
    built = build_scenario(data)
    check_outputs(options["output"], junit, scenario, built.model, built.router)
    _check_trace(trace, options["output"], scenario, built.model, built.router)
    if keep is not None:
        tier.check(built, options["vllm"])  # bad input leaves no folder
    with _keeping(keep, tier.name, built, options["vllm"]) as kept:
        result = tier.run(built, options["vllm"]) if trace is None else _run_traced(tier, built, trace, options["vllm"])
        if causes:
            from kvcover.sim.search.causes import explain

            result = explain(built, budget)
        if kept is not None:
            kept.add("result", result)
            kept.verdict = f"{result.outcome}: {MEANING[result.outcome]}"
        write_output(options["output"], result.to_json() + "\n")
    if options["as_json"]:
        click.echo(result.to_json())
    else:
        from kvcover.sim.results.show import show_forensics, show_result

        show_result(result)
        if verbose:
            show_forensics(result)

    from kvcover.sim.results.gate import Cell
    from kvcover.sim.results.verdict import judge_run

    asked = options["check"] or built.expect is not None
    verdict = judge_run(result, built.expect, check=options["check"] or not asked)
    cell = Cell(name=scenario or "scenario", verdict=verdict, seconds=result.seconds, replay=result.replay)
    write_junit(junit, "kvcover run", [cell], verdict)
    if asked:
        conclude(verdict)


def _keeping(keep: str | None, tier: str, built: Scenario, vllm: str | None) -> contextlib.AbstractContextManager[Any]:
    """The folder of evidence that `--keep` names, found by name as tiers are: the model needs no backend."""
    if keep is None:
        return contextlib.nullcontext()
    keeping = import_module("kvcover.real_backend.evidence.folder").keeping
    found: contextlib.AbstractContextManager[Any] = keeping(keep, shlex.join(["kvcover", *sys.argv[1:]]), tier, [(built, vllm)])
    return found


def _check_trace(path: str | None, output: str | None, *inputs: str | None) -> None:
    """Complain about a timeline that can't be written before the run, not after it."""
    check_output(path, *inputs, option="--trace")
    if path is not None and output is not None and os.path.realpath(path) == os.path.realpath(output):
        raise InputError("--trace", f"{path!r} is where -o writes", "name another file")


def _run_traced(tier: Tier, built: Scenario, path: str, vllm: str | None) -> Result:
    """Run and write the timeline: a view of the finished history, so that a run without one pays nothing."""
    from kvcover.sim.scenario.setup import resolve
    from kvcover.sim.simulate import steps_of_result, traced

    if tier.can.virtual_time:
        result, steps = traced(resolve(built))
    else:
        result = tier.run(built, vllm)
        steps = steps_of_result("--trace", result)
    write_trace(path, built, result, steps)
    return result
