"""`kvcover why`: the story of one request."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.options import causes_options, check_causes
from kvcover.sim.errors import InputError, short

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result


@click.command("why")
@click.argument("result")
@click.option("--request", type=int, default=0, show_default=True, metavar="N", help="Which request to tell of.")
@causes_options
def command(result: str, request: int, causes: bool, budget: float | None) -> None:
    """Tell the story of one request, from the router to its outcome, with times.

    RESULT is a file written by `kvcover run -o`, or - for standard input. A result of a real tier tells what was seen in that
    run, and whether the model plays the same scenario to the same end. One of the model is run again, and must give the same
    history.
    """
    check_causes(causes, budget)
    data = _read(result)
    scenario = data.get("scenario")
    if not isinstance(scenario, dict):
        raise InputError(result, "holds no scenario", "give a file written by `kvcover run -o FILE`")
    from kvcover.sim.results.story import story
    from kvcover.sim.scenario.scenario import build
    from kvcover.sim.scenario.setup import resolve
    from kvcover.sim.simulate import record_of, run_world

    setup = resolve(build(scenario))
    if not 0 <= request < len(setup.requests):
        raise InputError("--request", f"there is no request {request}", f"use 0 to {len(setup.requests) - 1}")
    again, world = run_world(setup)
    if data.get("digest") is None:
        _tell_real(result, data, request, again)
    else:
        if data.get("digest") != again.digest:
            click.echo("kvcover: this version plays the scenario differently from the one that wrote the result", err=True)
        for line in story(record_of(world), request):
            click.echo(line)
    if causes:
        from kvcover.sim.results.show import show_findings
        from kvcover.sim.search.causes import explain

        show_findings(explain(setup.scenario, budget))
    sys.stdout.flush()


def _tell_real(place: str, data: dict[str, Any], request: int, modelled: Result) -> None:
    """What a real run kept of the request, and what the model makes of it."""
    import msgspec

    count = len(modelled.by_request)
    try:
        stories = msgspec.convert((data.get("backend") or {}).get("stories"), list[list[str]])
        outcomes = msgspec.convert(data.get("by_request"), list[str])
    except (msgspec.ValidationError, AttributeError):
        stories, outcomes = [], []
    if not len(stories) == len(outcomes) == count:
        raise InputError(place, f"keeps no story of its {count} requests", "write it again with `kvcover run -o FILE`")
    for line in stories[request]:
        click.echo(_plain(line))
    seen, expected = outcomes[request], modelled.by_request[request]
    click.echo(f"the model ends it as {expected}" + (", as seen" if seen == expected else f", and this run as {_plain(seen)}"))


def _plain(text: str) -> str:
    """Text of a file as it may be shown: a file must not steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _read(path: str) -> dict[str, Any]:
    from kvcover.sim.files import MB, read_text

    hint = "give a file written by `kvcover run -o FILE`"
    try:
        data = json.loads(read_text(path, 64 * MB, hint))
    except (ValueError, RecursionError):
        raise InputError(path, "is not one JSON object", hint) from None
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    if not isinstance(data, dict):
        raise InputError(path, "is not one JSON object", hint)
    if data.get("schema") != 1:
        raise InputError(path, f"has schema {short(data.get('schema'))}", "this kvcover reads schema 1")
    return data
