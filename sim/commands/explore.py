"""`kvcover explore`: many scenarios from seeds or from a grid."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.matrix import _tp_list
from kvcover.sim.commands.options import (
    build_scenario,
    check_output,
    conclude,
    scenario_data,
    scenario_options,
    sizes,
    whole_number,
    write_output,
)
from kvcover.sim.errors import InputError, TierError, nearest

if TYPE_CHECKING:
    from kvcover.sim.search.explore import Exploration, FailureGroup, Work
    from kvcover.sim.tiers import Tier

_SHOWN_GROUPS = 20


@click.command("explore")
@click.option("--seeds", default=1000, show_default=True, metavar="N", type=click.IntRange(1, 10**9), help="How many seeds.")
@click.option("--seed-start", default=0, show_default=True, metavar="N", type=click.IntRange(0, 2**62), help="The first seed.")
@click.option("--lite/--full", "lite", default=True, show_default=True, help="Full adds large TP sizes and overrides.")
@click.option("--features", metavar="NAME,…", help="Draw only these features.")
@click.option("--no-faults", is_flag=True, help="Draw no faults, and no routers other than the release's own.")
@click.option("--grid", metavar="SCENARIO", help="No seeds: every single fault of this scenario file, for every pairing.")
@click.option("--mode", metavar="write|read", help="Only this mode.")
@click.option("--prefill", metavar="tp=N[,dp=N]", help="Sizes of prefill; with --grid a list of TP sizes, such as 1,2,4.")
@click.option("--decode", metavar="tp=N[,dp=N]", help="As --prefill.")
@click.option("--jobs", metavar="N|all", default="all", show_default=True, help="Processes; 1 runs everything in this one.")
@click.option("--dask", metavar="ADDRESS", help="Run on a Dask cluster, e.g. tcp://host:8786 (extra `dask`).")
@click.option("--budget", metavar="SECONDS", type=click.FloatRange(min=0), help="Begin nothing new after so many seconds.")
@click.option("--shrink", "shrinks", is_flag=True, help="Reduce each example to the smallest that finds the same.")
@click.option("--out", metavar="DIR", help="Write each group's example there, for `kvcover replay`.")
@scenario_options
def explore(**options: Any) -> None:
    """Draw scenarios and faults from seeds, run them, and report each kind of failure once, with its smallest example.

    Every other option pins a field, whatever a seed would draw. A run whose planned fault never fired is counted as
    vacuous, never as a pass. The digest does not depend on --jobs.

    With --tier connector each draft that the tier can run is run there and on the model, and a run in which they differ is
    a failure of its own kind, the worst: one of the two is wrong.
    """
    if options["budget"] is not None and math.isnan(options["budget"]):
        raise InputError("--budget", "nan is no number of seconds", "use a number such as 60")
    tier = _chosen(options)
    check_output(options["output"])
    if options["out"] is not None:
        _make_folder(options["out"])
    jobs, total = _grid_jobs(options, tier) if options["grid"] is not None else _seed_jobs(options, tier)
    summary = _run_jobs(jobs, total, options) if tier.can.virtual_time else _run_on_tier(tier, jobs, total, options)
    rate = summary.runs / max(summary.seconds, 1e-9)
    click.echo(f"{summary.runs} runs in {summary.seconds:.1f} s, {rate:.0f}/s", err=True)
    _report(summary, tier, options)
    if options["check"]:
        conclude(summary.verdict(whole=options["grid"] is not None))


def _run_jobs(jobs: Iterator[Work], total: int, options: dict[str, Any]) -> Exploration:
    """Run on the model, over processes or a cluster."""
    from kvcover.sim.search.explore import refuse_nonsense, run_jobs, shrink_groups
    from kvcover.sim.search.workers import executor

    with executor(_processes(options["jobs"]), options["dask"]) as (pool, workers):
        with _progress(total) as tick:
            budget = math.inf if options["budget"] is None else options["budget"]
            summary = run_jobs(jobs, pool, 2 * workers, budget, tick)
        refuse_nonsense(summary)
        if options["shrinks"]:
            shrink_groups(summary, pool)
    return summary


def _processes(jobs: str) -> int | None:
    """How many processes `--jobs` asks for; None: one a CPU."""
    if jobs == "all":
        return None
    count = whole_number("--jobs", jobs, jobs)
    if count < 1:
        raise InputError("--jobs", f"{count} processes can't run anything", "use 1 or more")
    return count


def _chosen(options: dict[str, Any]) -> Tier:
    """The tier; complains about options that mean nothing there."""
    from kvcover.sim.tiers import load_tier, refuse_options, tiers_that

    tier = load_tier(options["tier"])
    if tier.can.hardware:
        others = " or ".join(tiers_that(lambda can: not can.hardware))
        raise TierError("--tier", f"explore can't run on {tier.name!r}", f"use --tier {others}, and `kvcover run` for the rest")
    jobs = None if options["jobs"] == "all" else options["jobs"]
    asked = {"--vllm": options["vllm"], "--shrink": options["shrinks"], "--dask": options["dask"], "--jobs": jobs}
    refuse_options(tier, asked)
    return tier


def _run_on_tier(tier: Tier, jobs: Iterator[Work], total: int, options: dict[str, Any]) -> Exploration:
    """Run on a real tier and on the model."""
    from kvcover.sim.search.explore_tier import drafts_of, explore_tier

    with _progress(total) as tick:
        budget = math.inf if options["budget"] is None else options["budget"]
        summary = explore_tier(tier, drafts_of(tier, jobs), options["vllm"], budget, tick)
    if 0 < summary.runs == summary.outcomes.get("invalid", 0) + sum(summary.skipped.values()):
        raise InputError("explore", f"nothing could be run ({summary.invalid or next(iter(summary.skipped), '')})", "pin less")
    return summary


def _pins(options: dict[str, Any], tier: Tier) -> dict[str, Any]:
    """Fields that are as given, whatever a seed draws; complains at once about those that can't be."""
    from kvcover.sim.search.explore_tier import pinned
    from kvcover.sim.search.swarm import check_pins

    pins = scenario_data(None, options)
    if options["mode"] is not None:
        pins["mode"] = options["mode"]
    for name in ("prefill", "decode"):
        if found := sizes(f"--{name}", options[name]):
            pins[name] = {**(pins.get(name) or {}), **found}
    if "expect" in pins:
        raise InputError("expect", "what seeds draw has no single expectation", "leave it out")
    check_pins(pins)
    return pinned(tier, pins, options["vllm"])


def _seed_jobs(options: dict[str, Any], tier: Tier) -> tuple[Iterator[Work], int]:
    """The jobs of a swarm and how many runs they are; says first what will be drawn."""
    from kvcover.sim.search.explore import seed_jobs
    from kvcover.sim.search.swarm import Swarm, swarm_of

    names = None if options["features"] is None else [name.strip() for name in options["features"].split(",")]
    swarm = swarm_of(_pins(options, tier), names, not options["lite"], not options["no_faults"])
    able = tier.can.features
    if able is not None and not names:
        swarm = Swarm(features=tuple(name for name in swarm.features if name in able), pins=swarm.pins)
    first, count = options["seed_start"], options["seeds"]
    if not options["as_json"]:
        import json

        draft = swarm.draft(first, tier.fit)
        click.echo(f"seeds {first} to {first + count - 1}, {'lite' if options['lite'] else 'full'}")
        click.echo(f"features: {' '.join(swarm.features)}")
        if swarm.pins:
            click.echo(f"pinned: {json.dumps(swarm.pins)}")
        click.echo(f"seed {first} draws {', '.join(swarm.drawn(first)) or 'nothing'}: {json.dumps(draft)}")
    return seed_jobs(swarm, first, count), count


def _grid_jobs(options: dict[str, Any], tier: Tier) -> tuple[Iterator[Work], int]:
    """The jobs of a grid; how many runs they are is known only afterwards."""
    from kvcover.sim.search.explore import grid_jobs
    from kvcover.sim.search.explore_tier import pinned

    data = scenario_data(options["grid"], options)
    data.pop("expect", None)
    build_scenario(data)
    data = pinned(tier, data, options["vllm"])
    modes = ["write", "read"]
    if options["mode"] is not None:
        if options["mode"] not in modes:
            raise InputError("--mode", f"no mode {options['mode']!r}", nearest(options["mode"], modes))
        modes = [options["mode"]]
    own = [(data.get(name) or {}).get("tp", 1) for name in ("prefill", "decode")]
    lists = [
        _tp_list(f"--{name}", options[name]) if options[name] else [size]
        for name, size in zip(("prefill", "decode"), own, strict=True)
    ]
    pairs = [(prefill, decode) for prefill in lists[0] for decode in lists[1]]
    if not options["as_json"]:
        click.echo(f"every single fault of {options['grid']}, {' and '.join(modes)}, {len(pairs)} pairings")
    return grid_jobs(data, pairs, modes), 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Exploration], None]]:
    """A line on stderr with the rate so far, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda summary: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=total or None)

        def tick(summary: Exploration) -> None:
            rate = summary.runs / max(summary.seconds, 1e-9)
            bar.update(task, completed=summary.runs, description=f"{rate:.0f} runs/s, {summary.failures} failures")

        yield tick


# -- what came of it ---------------------------------------------------------------------------------------------


def _report(summary: Exploration, tier: Tier, options: dict[str, Any]) -> None:
    """Write the examples, then say what was found; examples that are shown are those that are written."""
    groups = summary.ranked()
    paths = _write_examples(groups, tier, options) if options["out"] is not None else []
    text = _as_json(summary, groups, paths, tier, options["vllm"])
    write_output(options["output"], text)
    if options["as_json"]:
        click.echo(text, nl=False)
        return
    from kvcover.sim.results.result import MEANING, OUTCOMES
    from kvcover.sim.search.explore_tier import again

    counts = [
        f"{summary.outcomes[name]} {name}"
        for name in (*OUTCOMES, "error", "differs", "invalid", "skipped")
        if name in summary.outcomes
    ]
    click.echo(f"{summary.runs} runs{' before the budget ended' if summary.stopped else ''}: {', '.join(counts) or 'none'}")
    if vacuous := summary.outcomes.get("vacuous"):
        click.echo(f"{vacuous} vacuous: {MEANING['vacuous']}; not counted as passes")
    if summary.invalid:
        click.echo(f"invalid, so not run: {summary.invalid}")
    if summary.skipped:
        reason, count = max(summary.skipped.items(), key=lambda item: item[1])
        click.echo(f"skipped: {sum(summary.skipped.values())}, most often ({count}) for: {reason}; not counted as passes")
    if summary.varied:
        click.echo(f"{summary.varied} runs differed from the model and agreed when run again: the connector's own timing varies")
    click.echo(f"{summary.failures} failures of {len(groups)} kinds" + (":" if groups else ""))
    for index, group in enumerate(groups[:_SHOWN_GROUPS]):
        _show_group(group, again(tier, group, paths[index] if paths else None, options["vllm"]))
    if len(groups) > _SHOWN_GROUPS:
        where = "all are in " + options["out"] if paths else "--out DIR writes all of them"
        click.echo(f"and {len(groups) - _SHOWN_GROUPS} kinds more; {where}")
    note = " of what was drawn and of the model's runs; real runs take real time, and have none"
    click.echo(f"digest {summary.digest}{'' if tier.can.virtual_time else note}")


def _show_group(group: FailureGroup, again: str) -> None:
    found = group.signature
    kinds = ", ".join(found.kinds) or "no finding"
    shape = ", ".join(group.shape)
    click.echo(f"- {found.outcome} ×{group.count}, {found.release}, {found.mode}: {kinds} ({group.name}: {shape})")
    click.echo(f"    {again}")


def _as_json(summary: Exploration, groups: list[FailureGroup], paths: list[str], tier: Tier, vllm: str | None) -> str:
    import json

    import msgspec

    from kvcover.sim.search.explore_tier import again

    rows = []
    for index, group in enumerate(groups):
        file = paths[index] if paths else None
        told = {"shape": list(group.shape), "count": group.count, "name": group.name, "scenario": group.draft}
        rows.append({**msgspec.to_builtins(group.signature), **told, "file": file, "replay": again(tier, group, None, vllm)})
    whole = {
        "schema": 1, "runs": summary.runs, "outcomes": summary.outcomes, "failures": summary.failures,
        "groups": rows, "digest": summary.digest, "stopped": summary.stopped,
        "skipped": summary.skipped, "varied": summary.varied,
    }  # fmt: skip
    return json.dumps(whole) + "\n"


def _make_folder(path: str) -> None:
    if not path:
        raise InputError("--out", "'' names no folder", "use --out . for this one")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--out", f"can't make {path!r}: {error.strerror}", "name a folder that you may write to") from None


def _write_examples(groups: list[FailureGroup], tier: Tier, options: dict[str, Any]) -> list[str]:
    """One file a group, named after its signature."""
    from kvcover.sim.search.explore_tier import failure_text

    paths = []
    for number, group in enumerate(groups):
        found = group.signature
        words = f"{number:03d}-{found.outcome}-{found.release.replace(' → other', '-skew')}-{found.mode}"
        path = str(Path(options["out"]) / f"{words}.toml")
        write_output(path, failure_text(tier, group, options["vllm"]))
        paths.append(path)
    return paths
