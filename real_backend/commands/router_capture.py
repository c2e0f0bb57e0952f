"""`kvcover router capture`: the legs of a live router, as they go by."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import click

from kvcover.faults.read import plain_int
from kvcover.sim.commands.options import check_output, write_output
from kvcover.sim.errors import InputError, short

if TYPE_CHECKING:
    from kvcover.real_backend.router.http_hop import Hop

_FORM = "write LISTEN=ENGINE such as 127.0.0.1:9100=127.0.0.1:8100"


@click.command("capture")
@click.option("--prefill", metavar="LISTEN=ENGINE", help="Addresses of the hop and of the prefill engine behind it.")
@click.option("--decode", metavar="LISTEN=ENGINE", help="The same for decode.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Wait no longer.")
@click.option("-o", "--output", metavar="FILE", help="Write the legs to a file as well, for --router.")
def command(prefill: str | None, decode: str | None, seconds: float, output: str | None) -> None:
    """Stand between a router and its engines, pass everything on, and note the legs of the first request.

    Register the engines with the router by the addresses of the hops (the engines' http_port). What is noted is a file for
    `kvcover router check` and --router. The exit code is 3 if not every hop saw a leg in time.
    """
    from kvcover.real_backend.driver.trial import ROLES
    from kvcover.real_backend.router.http_hop import capture

    check_output(output)
    given = dict(zip(ROLES, (prefill, decode), strict=True))
    hops = {role: _hop(f"--{role}", text) for role, text in given.items() if text is not None}
    if not hops:
        raise InputError("--prefill", "no hop is given", _FORM)
    told = ", ".join(f"{role} {hop.listen[0]}:{hop.listen[1]}" for role, hop in hops.items())
    try:
        legs = asyncio.run(capture(hops, seconds, lambda: click.echo(f"listening: {told}", err=True)))
    except OSError as error:
        raise InputError("LISTEN", f"can't listen: {error.strerror or error}", "use a free port of this machine") from None
    text = json.dumps(legs, indent=1) + "\n"
    if legs:
        write_output(output, text)
        click.echo(text, nl=False)
    if missing := [role for role in hops if role not in legs]:
        click.echo(f"kvcover: inconclusive: no leg for {' and '.join(missing)} in {seconds:g} s", err=True)
        sys.exit(3)


def _hop(option: str, text: str) -> Hop:
    from kvcover.real_backend.router.http_hop import Hop

    listen, equals, engine = text.partition("=")
    if not equals:
        raise InputError(option, f"can't read {short(text)}", _FORM)
    return Hop(_address(option, listen), _address(option, engine))


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        number = plain_int(port)
    except ValueError:
        number = 0
    if not host or not 1 <= number <= 65535:
        raise InputError(option, f"{short(text)} is no HOST:PORT", _FORM)
    return host, number
