"""`kvcover matrix`: every prefill-TP × decode-TP pairing."""

from __future__ import annotations

from typing import Any

import click

from kvcover.sim.commands.options import (
    build_scenario,
    check_output,
    conclude,
    scenario_data,
    scenario_options,
    whole_number,
    write_output,
)
from kvcover.sim.errors import InputError, nearest, short


@click.command("matrix")
@click.option("--mode", default="both", show_default=True, metavar="write|read|both", help="Transfer modes.")
@click.option("--prefill", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Prefill TP sizes.")
@click.option("--decode", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Decode TP sizes.")
@click.option("--markdown", is_flag=True, help="Print Markdown, to paste into a pull request.")
@scenario_options
def command(mode: str, prefill: str, decode: str, markdown: bool, **options: Any) -> None:
    """Run every prefill-TP × decode-TP pairing and say in one line what was found.

    Each cell shows the fraction of decode's KV cache that arrived, right, before decode was told to go, and the outcome.
    """
    if mode not in ("write", "read", "both"):
        raise InputError("--mode", f"no mode {mode!r}", nearest(mode, ("write", "read", "both")))
    modes = ["write", "read"] if mode == "both" else [mode]
    sizes = {"prefill": _tp_list("--prefill", prefill), "decode": _tp_list("--decode", decode)}
    data = scenario_data(None, options)
    _reject_axes(data)
    check_output(options["output"], data.get("model"))
    from kvcover.sim.results.verdict import judge_cells, together
    from kvcover.sim.search.matrix import matrix

    results = matrix(build_scenario(data), **sizes, modes=modes, tier=options["tier"], vllm=options["vllm"])
    lines = "".join(result.to_json() + "\n" for result in results)
    write_output(options["output"], lines)
    if options["as_json"]:
        click.echo(lines, nl=False)
    elif markdown:
        from kvcover.sim.results.show import matrix_markdown

        click.echo(matrix_markdown(results))
    else:
        from kvcover.sim.results.show import show_matrix

        show_matrix(results)
    if options["check"]:
        conclude(together(judge_cells(results), "pairings"))


def _reject_axes(data: dict[str, Any]) -> None:
    """Fields that the matrix itself sets, and which it would otherwise drop unread."""
    if "mode" in data:
        raise InputError("mode", f"{short(data['mode'])} would not be read: the matrix sets it", "use --mode")
    for name in ("prefill", "decode"):
        if "tp" in data.get(name, {}):
            raise InputError(f"{name}.tp", f"{short(data[name]['tp'])} would not be read: the matrix sets it", f"use --{name}")


def _tp_list(option: str, text: str) -> list[int]:
    """`1,2,4,8` in the order given, each once."""
    values = [whole_number(option, part.strip().removeprefix("tp="), text) for part in text.split(",")]
    for value in values:
        if not 1 <= value <= 256:
            raise InputError(option, f"{value} is no TP size", "use 1 to 256")
        if values.count(value) > 1:
            raise InputError(option, f"{value} is given twice in {text!r}", "give each size once")
    return values
