"""`kvcover why`: the story of one request."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.options import causes_options, check_causes, check_output, write_trace
from kvcover.sim.errors import InputError, plain

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result


@click.command("why")
@click.argument("result")
@click.option("--request", type=int, default=0, show_default=True, metavar="N", help="Which request to tell of.")
@click.option("--baseline", metavar="FILE", help="Another result, of any tier: name the first events that only one of both has.")
@click.option("--trace", metavar="FILE", help="Write every event as a timeline for Perfetto; a name in .jsonl: a line an event.")
@causes_options
def command(result: str, request: int, baseline: str | None, trace: str | None, causes: bool, budget: float | None) -> None:
    """Tell the story of one request, from the router to its outcome, with times.

    RESULT is a file written by `kvcover run -o`, or - for standard input; of a matrix's, FILE:3 is its third result, of a
    confirmation's FILE:before and FILE:after are its two. A result of a real tier tells what was seen in that run, and the first
    events in which it departs from what the model plays. One of the model is run again, and must give the same history.
    """
    check_causes(causes, budget)
    check_output(trace, result, baseline, option="--trace")
    told = _read(result)
    other = None if baseline is None else _read(baseline)
    from kvcover.sim.results.depart import departures, steps_of
    from kvcover.sim.results.result import on_one_machine
    from kvcover.sim.results.story import story
    from kvcover.sim.scenario.scenario import build
    from kvcover.sim.scenario.setup import resolve
    from kvcover.sim.simulate import record_of, run_world, steps_of_result

    setup = resolve(build(told.scenario or {}))
    if not 0 <= request < len(setup.requests):
        raise InputError("--request", f"there is no request {request}", f"use 0 to {len(setup.requests) - 1}")
    # What a real run is compared with has the times of what it ran on.
    on_loopback = on_one_machine(told)
    again, world = run_world(resolve(build((told.scenario or {}) | {"fabric": "loopback"})) if on_loopback else setup)
    if told.digest is None:
        _tell_real(result, told, request, again)
        if "events" in (told.backend or {}):
            _tell_departures(departures(steps_of_result(result, told), steps_of(world.history.rows), "the model"), "the model")
        else:
            click.echo("it keeps no events that could be compared with the model's")
    else:
        if told.digest != again.digest:
            click.echo("kvcover: this version plays the scenario differently from the one that wrote the result", err=True)
        for line in story(record_of(world), request):
            click.echo(line)
    if other is not None and baseline is not None:
        lines = departures(steps_of_result(result, told), steps_of_result(baseline, other), baseline)
        _tell_departures(lines, baseline)
    if trace is not None:
        from kvcover.sim.simulate import traced

        write_trace(trace, setup.scenario, told, steps_of_result(result, told) if told.digest is None else traced(setup)[1])
    if causes:
        from kvcover.sim.results.show import show_findings
        from kvcover.sim.search.causes import explain

        show_findings(explain(setup.scenario, budget))
    sys.stdout.flush()


def _read(path: str) -> Result:
    """A result that says what was run."""
    from kvcover.sim.results.read import read_result

    result = read_result(path)
    if result.scenario is None:
        raise InputError(path, "holds no scenario", "give a file written by `kvcover run -o FILE`")
    return result


def _tell_departures(lines: list[str], there: str) -> None:
    """The first events that only this run or the other has."""
    for line in lines or [f"the same events as {there}, whatever their order and number"]:
        click.echo(plain(line))


def _tell_real(place: str, told: Result, request: int, modelled: Result) -> None:
    """What a real run kept of the request, and what the model makes of it."""
    import msgspec

    count = len(modelled.by_request)
    try:
        stories = msgspec.convert((told.backend or {}).get("stories"), list[list[str]])
    except msgspec.ValidationError:
        stories = []
    if not len(stories) == len(told.by_request) == count:
        raise InputError(place, f"keeps no story of its {count} requests", "write it again with `kvcover run -o FILE`")
    for line in stories[request]:
        click.echo(plain(line))
    seen, expected = told.by_request[request], modelled.by_request[request]
    click.echo(f"the model ends it as {expected}" + (", as seen" if seen == expected else f", and this run as {plain(seen)}"))
