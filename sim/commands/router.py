"""`kvcover router`: what a router sends, and what comes of it. Its commands are loaded when they are asked for."""

from __future__ import annotations

import click

from kvcover.sim.commands.lazy import LazyGroup

COMMANDS = {
    "check": "kvcover.sim.commands.router_check:command",
    "capture": "kvcover.real_backend.commands.router_capture:command",
    "keys": "kvcover.sim.commands.router_keys:command",
    "record": "kvcover.real_backend.commands.router_record:command",
}


@click.group("router", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """What a router sends, who reads it, and what comes of it. `kvcover routers` lists the recorded ones."""
