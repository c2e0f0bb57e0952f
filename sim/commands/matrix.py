"""`kvcover matrix`: every prefill-TP × decode-TP pairing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.gating import (
    baseline_option,
    check_outputs,
    conclude_lost,
    junit_option,
    refuse_both,
    show_gate,
    write_junit,
)
from kvcover.sim.commands.options import (
    build_scenario,
    choose_mori,
    conclude,
    modes_of,
    scenario_data,
    scenario_options,
    tp_list,
    write_output,
)
from kvcover.sim.errors import InputError, TierError, short

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import Scenario


@click.command("matrix")
@click.option("--mode", default="both", show_default=True, metavar="write|read|both", help="Transfer modes.")
@click.option("--prefill", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Prefill TP sizes.")
@click.option("--decode", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Decode TP sizes.")
@click.option("--markdown", is_flag=True, help="Print Markdown, to paste into a pull request.")
@baseline_option("Fail only where a pairing is worse than there: what -o wrote earlier, or a release, run as well.")
@junit_option
@scenario_options
def command(mode: str, prefill: str, decode: str, markdown: bool, baseline: str | None, junit: str | None, **options: Any) -> None:
    """Run every prefill-TP × decode-TP pairing and say in one line what was found.

    Each cell shows the fraction of decode's KV cache that arrived, right, before decode was told to go, and the outcome.

    With --baseline the exit code is 1 if a pairing is worse than in the baseline, 3 if that can't be told of all, else 0. A
    pairing that the baseline lacks must be good.
    """
    modes = modes_of(mode)
    sizes = {"prefill": tp_list("--prefill", prefill), "decode": tp_list("--decode", decode)}
    data = scenario_data(None, options)
    _reject_axes(data)
    refuse_both(baseline, options["check"])
    check_outputs(options["output"], junit, data.get("model"), data.get("router"), baseline)
    from kvcover.sim.search.matrix import pairings

    scenarios = pairings(build_scenario(data), **sizes, modes=modes)
    now, before = _run(scenarios, baseline, options)
    from kvcover.sim.results.read import results_text

    results = [result for result in now.values() if not isinstance(result, TierError)]
    lines = [result.to_json() for result in results]
    write_output(options["output"], results_text(options["output"], lines))
    _show(results, lines, markdown, options["as_json"])
    _judge(now, before, baseline, junit, options)


Found = dict[str, "Result | TierError"]


def _run(scenarios: list[Scenario], baseline: str | None, options: dict[str, Any]) -> tuple[Found, Found | None]:
    """Every pairing by name, and the baseline's; a file is read before anything runs."""
    from kvcover.sim.results.read import read_results
    from kvcover.sim.results.regress import by_pairing, pairing, refuse_other_matrix
    from kvcover.sim.search.baseline import as_baseline, baseline_release, run_beside
    from kvcover.sim.tiers import load_tier

    named = {pairing(each.mode, each.prefill.tp, each.decode.tp): each for each in scenarios}
    release = None if baseline is None else baseline_release(baseline)
    stored: Found | None = None
    if baseline is not None and release is None:
        kept = by_pairing(read_results(baseline), baseline)
        refuse_other_matrix(baseline, kept, options["tier"], named)
        stored = dict(kept)
    beside = [] if release is None else [as_baseline(each, release) for each in scenarios]
    tier = load_tier(options["tier"])
    choose_mori(tier, options["mori"])
    now, stock = run_beside(tier, scenarios, options["vllm"], beside)
    return dict(zip(named, now, strict=True)), stored if release is None else dict(zip(named, stock, strict=True))


def _show(results: list[Result], lines: list[str], markdown: bool, as_json: bool) -> None:
    if as_json:
        click.echo("".join(line + "\n" for line in lines), nl=False)
    elif results and markdown:
        from kvcover.sim.results.show import matrix_markdown

        click.echo(matrix_markdown(results))
    elif results:
        from kvcover.sim.results.show import show_matrix

        show_matrix(results)


def _judge(now: Found, before: Found | None, baseline: str | None, junit: str | None, options: dict[str, Any]) -> None:
    """Say what is worse, write JUnit, and exit with what comes of it; without baseline and --check nobody asked."""
    from kvcover.sim.results.gate import cells_of, verdict_of
    from kvcover.sim.results.verdict import judge_run

    cells = cells_of(now, before, lambda name, result: judge_run(result))
    verdict = verdict_of(cells, "pairings")
    write_junit(junit, "kvcover matrix", cells, verdict)
    if baseline is not None:
        show_gate(cells, baseline, err=options["as_json"])
    if baseline is not None or options["check"]:
        conclude(verdict)
    conclude_lost(now.values(), "pairings")


def _reject_axes(data: dict[str, Any]) -> None:
    """Fields that the matrix itself sets, and which it would otherwise drop unread."""
    if "mode" in data:
        raise InputError("mode", f"{short(data['mode'])} would not be read: the matrix sets it", "use --mode")
    for name in ("prefill", "decode"):
        if "tp" in data.get(name, {}):
            raise InputError(f"{name}.tp", f"{short(data[name]['tp'])} would not be read: the matrix sets it", f"use --{name}")
