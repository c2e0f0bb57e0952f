"""`kvcover explore`: many scenarios from seeds or from a grid."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.gating import baseline_option, check_outputs, junit_option
from kvcover.sim.commands.options import (
    build_scenario,
    choose_mori,
    conclude,
    scenario_data,
    scenario_options,
    sizes,
    tp_list,
    whole_number,
)
from kvcover.sim.errors import InputError, TierError, nearest

if TYPE_CHECKING:
    from kvcover.sim.commands.explore_report import Report
    from kvcover.sim.search.explore import Work
    from kvcover.sim.search.failures import Exploration
    from kvcover.sim.search.journal import Journal
    from kvcover.sim.tiers import Tier

_MOST_JOBS = 512


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
@click.option("--out", metavar="DIR", help="Write each group's example there as it is found, and go on where it was stopped.")
@baseline_option("Only what is worse there is a failure: each bad run is repeated on this release.", "R")
@junit_option
@scenario_options
def explore(**options: Any) -> None:
    """Draw scenarios and faults from seeds, run them, and report each kind of failure once, with its smallest example.

    Every other option pins a field, whatever a seed would draw; what makes no sense beside it is not drawn. A run whose planned
    fault never fired is counted as vacuous, never as a pass. The digest does not depend on --jobs.

    With --out all that has run is kept as it ends: the same command goes on there after an interruption.

    With --tier connector each draft that the tier can run is run there and on the model, and a run in which they differ is
    a failure of its own kind, the worst: one of the two is wrong.
    """
    if options["budget"] is not None and math.isnan(options["budget"]):
        raise InputError("--budget", "nan is no number of seconds", "use a number such as 60")
    if options["out"] == "":
        raise InputError("--out", "'' is no folder", "name one, or leave the option out")
    tier = _chosen(options)
    if options["baseline"] is not None:
        from kvcover.sim.releases.records import get_release

        options["baseline"] = get_release(options["baseline"], "--baseline").name
    check_outputs(options["output"], options["junit"])
    _processes(options["jobs"])
    jobs, total, what = _grid_jobs(options, tier) if options["grid"] is not None else _seed_jobs(options, tier)
    from kvcover.sim.commands.explore_report import Report
    from kvcover.sim.search.failures import Exploration
    from kvcover.sim.search.journal import Journal

    summary = Exploration()
    report = Report(tier, options)
    journal = Journal(Path(options["out"]), what) if options["out"] is not None else None
    if journal is not None:
        journal.restore(summary)
        if summary.runs:
            click.echo(f"{options['out']} has {summary.runs} runs of it already; it goes on after them", err=True)
    before, lost = summary.runs, ""
    try:
        _run(tier, jobs, total, summary, journal, report, options)
    except InputError as error:
        if error.place != "--out":
            raise
        lost = str(error)
    rate = (summary.runs - before) / max(summary.seconds, 1e-9)
    click.echo(f"{summary.runs - before} runs in {summary.seconds:.1f} s, {rate:.0f}/s", err=True)
    _refuse_nonsense(summary)
    report.show(summary)
    _end(summary, options, lost)


def _run(
    tier: Tier,
    jobs: Callable[[Exploration], Iterator[Work]],
    total: int | None,
    summary: Exploration,
    journal: Journal | None,
    report: Report,
    options: dict[str, Any],
) -> None:
    """Run what is left to do; what ends in time is in the summary, and in the journal."""
    from kvcover.sim.progress import progress

    left = None if total is None else max(total - summary.runs, 0)
    budget = math.inf if options["budget"] is None else options["budget"]
    with progress(left, "runs") as bar:
        known = [summary.runs]

        def tick(summary: Exploration) -> None:
            bar.advance(summary.runs - known[0])
            known[0] = summary.runs
            bar.say(f"{summary.runs / max(summary.seconds, 1e-9):.0f} runs/s, {summary.failures} failures")
            report.stream(summary)

        keep = journal.add if journal is not None else lambda report: None
        if tier.can.virtual_time:
            _run_here(jobs(summary), summary, keep, tick, budget, options)
        else:
            from kvcover.sim.search.explore_tier import TierExploration, drafts_of

            exploration = TierExploration(
                tier, options["vllm"], budget_s=budget, baseline=options["baseline"] or "", summary=summary, keep=keep, tick=tick
            )
            exploration.run(drafts_of(tier, jobs(summary)))


def _run_here(
    jobs: Iterator[Work],
    summary: Exploration,
    keep: Callable[[Any], None],
    tick: Callable[[Exploration], None],
    budget: float,
    options: dict[str, Any],
) -> None:
    """Run on the model, over processes or a cluster."""
    from kvcover.sim.search.explore import INTERRUPTED, run_jobs, shrink_groups
    from kvcover.sim.search.workers import executor

    with executor(_processes(options["jobs"]), options["dask"]) as (pool, workers):
        run_jobs(jobs, pool, 2 * workers, budget, tick, summary, keep)
        if options["shrinks"] and not summary.ended.startswith(("it was", "a worker")):
            try:
                shrink_groups(summary, pool, options["baseline"] or "")
            except KeyboardInterrupt:
                summary.ended = INTERRUPTED


def _end(summary: Exploration, options: dict[str, Any], lost: str) -> None:
    """The exit code: what could not be kept, an interruption, a worker's death, then what --check asks."""
    from kvcover.sim.results.verdict import inconclusive
    from kvcover.sim.search.explore import INTERRUPTED, KILLED

    if lost:
        click.echo(f"kvcover: {lost}; what ran until then is told above", err=True)
        sys.exit(2)
    again = "; the same command goes on there" if options["out"] is not None else "; --out DIR would let it go on"
    if summary.ended == INTERRUPTED:
        click.echo(f"kvcover: {INTERRUPTED} after {summary.runs} runs{again}", err=True)
        from kvcover.sim.signals import interruption

        raise interruption()
    if summary.ended == KILLED:
        conclude(inconclusive(f"{KILLED}, after {summary.runs} runs{again}"))
    if options["check"] or options["baseline"] is not None:
        conclude(summary.verdict(whole=options["grid"] is not None))


def _refuse_nonsense(summary: Exploration) -> None:
    """Raise InputError if there were runs, and none of them made sense or could be run."""
    from kvcover.sim.search.explore import refuse_nonsense

    refuse_nonsense(summary)
    if 0 < summary.runs == summary.outcomes.get("invalid", 0) + sum(summary.skipped.values()):
        raise InputError("explore", f"nothing could be run ({summary.invalid or next(iter(summary.skipped), '')})", "pin less")


def _processes(jobs: str) -> int | None:
    """How many processes `--jobs` asks for; None: one a CPU."""
    if jobs == "all":
        return None
    count = whole_number("--jobs", jobs, jobs)
    if not 1 <= count <= _MOST_JOBS:
        raise InputError("--jobs", f"{count} processes are {'none' if count < 1 else 'too many'}", f"use 1 to {_MOST_JOBS}, or all")
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
    choose_mori(tier, options["mori"])
    return tier


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
    check_pins(pins)
    return pinned(tier, pins, options["vllm"])


Jobs = Callable[["Exploration"], "Iterator[Work]"]


def _seed_jobs(options: dict[str, Any], tier: Tier) -> tuple[Jobs, int, dict[str, Any]]:
    """The jobs of a swarm that are left after some, how many runs all are, and what is explored; says first what will be drawn."""
    import msgspec

    from kvcover.sim.search.explore import seed_jobs
    from kvcover.sim.search.swarm import Swarm, swarm_of

    names = None if options["features"] is None else [name.strip() for name in options["features"].split(",")]
    beside = options["baseline"] is not None
    swarm = swarm_of(_pins(options, tier), names, not options["lite"], not options["no_faults"], beside)
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
    baseline = options["baseline"] or ""

    def left(summary: Exploration) -> Iterator[Work]:
        done = summary.runs if tier.can.virtual_time else 0  # a real tier tells its drafts apart by itself
        return seed_jobs(swarm, first + done, max(count - done, 0), baseline=baseline)

    return left, count, _what(tier, options, {"swarm": msgspec.to_builtins(swarm), "first": first})


def _grid_jobs(options: dict[str, Any], tier: Tier) -> tuple[Jobs, None, dict[str, Any]]:
    """As _seed_jobs of a grid; how many runs they are is known only afterwards."""
    from kvcover.sim.search.explore import grid_jobs
    from kvcover.sim.search.explore_tier import pinned

    data = scenario_data(options["grid"], options)
    build_scenario(data)
    data = pinned(tier, data, options["vllm"])
    modes = ["write", "read"]
    if options["mode"] is not None:
        if options["mode"] not in modes:
            raise InputError("--mode", f"no mode {options['mode']!r}", nearest(options["mode"], modes))
        modes = [options["mode"]]
    own = [(data.get(name) or {}).get("tp", 1) for name in ("prefill", "decode")]
    lists = [
        tp_list(f"--{name}", options[name]) if options[name] else [size]
        for name, size in zip(("prefill", "decode"), own, strict=True)
    ]
    pairs = [(prefill, decode) for prefill in lists[0] for decode in lists[1]]
    if not options["as_json"]:
        click.echo(f"every single fault of {options['grid']}, {' and '.join(modes)}, {len(pairs)} pairings")
    baseline = options["baseline"] or ""

    def left(summary: Exploration) -> Iterator[Work]:
        jobs = grid_jobs(data, pairs, modes, baseline)
        return (job for job in jobs if not tier.can.virtual_time or job.at not in summary.digests)

    return left, None, _what(tier, options, {"grid": data, "pairs": pairs, "modes": modes})


def _what(tier: Tier, options: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """What is explored, as plain data: another exploration is one in which this differs."""
    import json

    from kvcover.sim.search.journal import CODE

    named: dict[str, Any] = {"tier": tier.name, "vllm": options["vllm"], "baseline": options["baseline"], **drawn}
    if options["mori"] is not None:
        named["mori"] = options["mori"]
    if options["vllm"] is not None and options["out"] is not None:
        named[CODE] = tier.code_of(options["vllm"])  # a working copy is edited, and goes by the same name
    plain: dict[str, Any] = json.loads(json.dumps(named))
    return plain
