"""`kvcover compat`: which router goes with which vLLM release."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.options import build_scenario, check_output, modes_of, release_list, tier_option, tp_list, write_output

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result
    from kvcover.sim.scenario.scenario import Scenario
    from kvcover.sim.search.compat import Cell

_MODEL = "layers=2,mla=64+16"
_RUN_S = 6


@click.command("compat")
@click.option("--router", "routers", multiple=True, metavar="NAME|FILE", help="Only this router, or your own legs. Repeatable.")
@click.option("--release", default="all", show_default=True, metavar="R,R,…", help="vLLM releases of both engines.")
@click.option("--mode", default="both", show_default=True, metavar="write|read|both", help="Transfer modes.")
@click.option("--prefill", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Prefill TP sizes.")
@click.option("--decode", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Decode TP sizes.")
@click.option("--model", default=_MODEL, show_default=True, metavar="M", help="As for `kvcover run`.")
@tier_option("Where to confirm what the model says")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a router, release and mode.")
@click.option("-o", "--output", metavar="FILE", help="Write the JSON to a file as well.")
def command(
    routers: tuple[str, ...], release: str, mode: str, prefill: str, decode: str, model: str, tier: str, **options: Any
) -> None:
    """Say which routers go with which vLLM releases, by mode and TP pairing.

    A cell says for which pairings decode gets what it needs: all, equal TP only, none, or how many; and the worst that
    becomes of the others. With one router and one release it shows the pairings and the command that shows each. Another
    tier runs the same pairings for real and says where it differs from the model.
    """
    from kvcover.sim.results.read import results_text
    from kvcover.sim.search.compat import cells, compat_scenarios, confirmed, count_runs, default_routers, run_all
    from kvcover.sim.tiers import load_tier

    check_output(options["output"], model, *routers)
    real = load_tier(tier)
    sizes = tp_list("--prefill", prefill), tp_list("--decode", decode)
    names = list(dict.fromkeys(routers)) or default_routers()
    scenarios = compat_scenarios(build_scenario({"model": model}), names, release_list(release), modes_of(mode), sizes)
    results = run_all(scenarios, load_tier("model"))
    agreed: list[bool] | None = None
    if tier != "model":
        runs = count_runs(scenarios)
        click.echo(f"{runs} runs on the {tier} tier, about {max(1, round(runs * _RUN_S / 60))} min on two cores", err=True)
        seen = run_all(scenarios, real)
        agreed, results = confirmed(results, seen), seen
    found = list(cells(scenarios, results))
    lines = [json.dumps(line, ensure_ascii=False) for line in _lines(found, agreed)]
    write_output(options["output"], results_text(options["output"], lines))
    if options["as_json"]:
        click.echo(results_text(None, lines), nl=False)
        return
    if options["markdown"]:
        click.echo(_markdown(found, model))
    else:
        _show(found, scenarios, results)
    if agreed is not None:
        click.echo(f"{tier} tier: {sum(agreed)} of {len(agreed)} pairings are as the model says")


def _lines(found: Sequence[Cell], agreed: Sequence[bool] | None) -> list[dict[str, Any]]:
    import msgspec

    lines = [msgspec.to_builtins(cell) for cell in found]
    if agreed is not None:
        left = iter(agreed)
        for line in lines:
            for pairing in line["pairings"]:
                pairing["as_modelled"] = next(left)
    return lines


def _cell(cell: Cell) -> str:
    return cell.works + (f", else {cell.worst}" if cell.worst else "") + (", race" if cell.race else "")


def _markdown(found: Sequence[Cell], model: str) -> str:
    """One table a mode: routers down, releases across."""
    lines: list[str] = []
    for mode in dict.fromkeys(cell.mode for cell in found):
        mine = {(cell.router, cell.release): cell for cell in found if cell.mode == mode}
        rows, columns = (list(dict.fromkeys(key[part] for key in mine)) for part in (0, 1))
        lines += [f"**{mode.upper()}**, {model}: TP pairings that work", "", "| router | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        lines += [f"| {r} | " + " | ".join(_cell(mine[r, c]) if (r, c) in mine else "" for c in columns) + " |" for r in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def _show(found: Sequence[Cell], scenarios: Sequence[Scenario], results: Sequence[Result]) -> None:
    """A table a mode, releases that are alike in one row; of one router and release the pairings."""
    from rich.table import Table

    from kvcover.sim.results.show import console, show_matrix
    from kvcover.sim.scenario.routers import ROUTERS
    from kvcover.sim.search.corpus import spans

    out = console()
    if len({(cell.router, cell.release) for cell in found}) == 1:
        show_matrix(list(results))
        for (mode, outcome), command in _examples(found).items():
            out.print(f"{mode} {outcome}: {command}", soft_wrap=True)
        return
    for mode in dict.fromkeys(cell.mode for cell in found):
        out.print(f"{mode.upper()}, {scenarios[0].model}: pairings that work, and the worst that becomes of the others")
        table = Table()
        for column in ("router", "releases", "works", "else"):
            table.add_column(column, overflow="fold")
        for routers, rows in _alike([cell for cell in found if cell.mode == mode]):
            for index, ((works, worst, race), releases) in enumerate(rows):
                last = index == len(rows) - 1
                names = routers[index:] if last else routers[index : index + 1]
                table.add_row("\n".join(names), spans(releases), works + (", race" if race else ""), worst, end_section=last)
        out.print(table)
    if any(cell.race for cell in found):
        out.print("race: nothing but time orders what decode uses (docs/order.md)")
    for name in sorted({cell.router for cell in found} & {name for name, router in ROUTERS.items() if not router.recorded}):
        out.print(f"{name}: {ROUTERS[name].source}", soft_wrap=True)


def _examples(found: Sequence[Cell]) -> dict[tuple[str, str], str]:
    """A command for each outcome that is not good."""
    examples: dict[tuple[str, str], str] = {}
    for cell in found:
        for pairing in cell.pairings:
            if not pairing.good:
                examples.setdefault((cell.mode, pairing.outcome), pairing.command)
    return examples


Row = tuple[tuple[str, str, bool], list[str]]


def _alike(found: Sequence[Cell]) -> list[tuple[list[str], list[Row]]]:
    """Routers that are the same everywhere, with what they come to and on which releases."""
    by_router: dict[str, dict[tuple[str, str, bool], list[str]]] = {}
    for cell in found:
        by_router.setdefault(cell.router, {}).setdefault((cell.works, cell.worst, cell.race), []).append(cell.release)
    groups: dict[str, tuple[list[str], list[Row]]] = {}
    for router, rows in by_router.items():
        groups.setdefault(repr(rows), ([], list(rows.items())))[0].append(router)
    return list(groups.values())
