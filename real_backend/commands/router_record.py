"""`kvcover router record`: runs a real router between stub engines, and what it sends becomes a file for `--router`."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.options import check_output, write_output
from kvcover.sim.errors import InputError, short

if TYPE_CHECKING:
    from kvcover.real_backend.router.program import Program
    from kvcover.real_backend.router.record import Exchange
    from kvcover.sim.scenario.routers import Router


@click.command("record")
@click.argument("router", required=False)
@click.option("--vllm", metavar="PATH", help="The working copy of vLLM whose own toy-proxy to record.")
@click.option("--command", "own", metavar="COMMAND", help="Start this router; {port} and {discovery} stand for its ports.")
@click.option(
    "--options", "more", metavar="WORDS", default="", help="More options for vllm-router, such as '--policy round_robin'."
)
@click.option("--mode", default="write,read", show_default=True, metavar="MODE,…", help="Which legs to record.")
@click.option("--release", metavar="RELEASE", help="Whose answers the prefill stub gives in READ (default: the newest).")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True,
              help="For the router's start, and for each answer.")  # fmt: skip
@click.option("--recordings", metavar="FILE", help="Write every leg as it was received to a file as well (TOML).")
@click.option("-o", "--output", metavar="FILE", help="Write the legs to a file as well, for --router.")
@click.option("--check", is_flag=True, help="Exit with 1 if the package has this router and its legs differ.")
def command(
    router: str | None, vllm: str | None, own: str | None, more: str, mode: str, release: str | None, seconds: float,
    recordings: str | None, output: str | None, check: bool,
) -> None:  # fmt: skip
    """Start a real router on loopback between stub engines, and record the legs that it sends, as a file for --router.

    ROUTER is 'vllm-router 0.1.17' or 'toy-proxy 0.33.0', installed by pip into an environment of its own in your cache;
    `toy-proxy --vllm PATH` is that of a working copy, and --command any other that takes MoRI-IO's registrations. Recorded are
    both modes, some sizes, completions and chat, plain and streamed; then where it sends requests if there are two instances a
    role. A router that ends by itself is exit code 2; one that never listens, registers or answers is 3.
    """
    from kvcover.real_backend.router.program import own_command, program_of
    from kvcover.real_backend.router.templates import differences, fitted, legs_as_file
    from kvcover.sim.releases.records import NEWEST, get_release
    from kvcover.sim.scenario.legs_file import MODES

    check_output(output)
    check_output(recordings, option="--recordings")
    modes = mode.split(",")
    if unknown := [each for each in modes if each not in MODES]:
        raise InputError("--mode", f"no mode {short(unknown[0])}", "use write, read or write,read")
    if (router is None) == (own is None):
        raise InputError("ROUTER", "give a router's name, or --command, and not both", "such as 'vllm-router 0.1.17'")
    for option, given in (("--check", check), ("--options", more), ("--vllm", vllm)):
        if own is not None and given:
            raise InputError(option, "means nothing beside --command", "leave it out; options may stand in the command")
    release = get_release(release or NEWEST, "--release").name
    known = _packaged(router, vllm)
    if check and known is None:
        raise InputError("--check", f"the package has no {router} to compare with", "leave it out")
    options = _words(more)
    program = own_command(own) if own is not None else program_of(str(router), vllm, options, _say)
    exchanges = _play(program, modes, release, seconds)
    found, notes = fitted(program.name, exchanges)
    wrong = differences(found, exchanges)
    text = json.dumps(legs_as_file(found), indent=1) + "\n"
    write_output(output, text)
    click.echo(text, nl=False)
    for note in [*notes, *(f"not explained: {line}" for line in wrong if not notes)]:
        _say(note)
    if more_legs := sum(each.more > 0 for each in exchanges):
        _say(f"{more_legs} of {len(exchanges)} requests had more than two legs; the first of each role is told")
    crowds = _ask_crowds(program, modes, seconds)
    _write_recordings(recordings, program.name, exchanges, crowds, options)
    if known is not None:
        _compare(known, differences(known, exchanges), len(exchanges), check)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError("--options", f"can't read {short(text)}: {error}", "close the quotes") from None


def _say(text: str) -> None:
    click.echo(text, err=True)


def _packaged(router: str | None, vllm: str | None) -> Router | None:
    """The router of that name that the package has, None if it has none."""
    from kvcover.sim.releases.records import ALIASES, RELEASES
    from kvcover.sim.scenario.routers import ROUTERS, TOY_PROXY, get_router

    name, _, version = (router or "").partition(" ")
    if vllm is None and name == TOY_PROXY and version in {*RELEASES, *ALIASES}:
        return get_router(TOY_PROXY, version)
    return ROUTERS.get(router or "") if vllm is None else None


def _play(program: Program, modes: list[str], release: str, seconds: float) -> list[Exchange]:
    from kvcover.real_backend.router.record import EVERY_WAY, record
    from kvcover.real_backend.router.templates import grid

    shapes = grid(modes, release)
    _say(f"recording {program.name}: {len(shapes)} deployments, {len(EVERY_WAY)} requests each")
    return [each for shape in shapes for each in record(program, shape, EVERY_WAY, seconds)]


def _ask_crowds(program: Program, modes: list[str], seconds: float) -> list[list[Exchange]]:
    """Two instances a role: tell which slots are hit, by mode."""
    from kvcover.real_backend.router.choices import REQUESTS, choices, crowd
    from kvcover.real_backend.router.record import PLAIN, record

    crowds = []
    for mode in modes:
        crowds.append(record(program, crowd(mode), [PLAIN] * REQUESTS, seconds))
        _say(f"{mode}, two instances a role with two DP ranks each, one request after another: {choices(crowds[-1]).told()}")
    return crowds


def _write_recordings(
    path: str | None, name: str, exchanges: list[Exchange], crowds: list[list[Exchange]], options: list[str]
) -> None:
    if path is None:
        return
    from kvcover.real_backend.router.choices import choices
    from kvcover.real_backend.router.files import as_toml, choice_table, leg_tables

    today = datetime.date.today().isoformat()
    chosen = [choice_table(name, crowd, choices(crowd).order, today, options) for crowd in crowds]
    write_output(
        path, as_toml("leg", list(leg_tables(name, exchanges, today, options))) + "\n" + as_toml("choice", chosen), "--recordings"
    )


def _compare(known: Router, wrong: list[str], count: int, check: bool) -> None:
    """Say whether the package's legs are the same; raise SystemExit if they should be and are not."""
    if not wrong:
        _say(f"the package's {known.name} sends the same: {2 * count} of {2 * count} legs")
        return
    for line in wrong[:10]:
        _say(f"differs: {line}")
    if check:
        _say(f"kvcover: check failed: the package's {known.name} differs in {len(wrong)} keys, sizes and legs")
        sys.exit(1)
