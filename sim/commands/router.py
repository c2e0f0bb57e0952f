"""`kvcover router`: what a router sends, and what comes of it. Its commands are loaded when they are asked for."""

from __future__ import annotations

from importlib import import_module

import click

from kvcover.sim.errors import InputError, nearest, short

COMMANDS = {
    "check": "kvcover.sim.commands.router_check:command",
    "capture": "kvcover.real_backend.commands.router_capture:command",
    "keys": "kvcover.sim.commands.router_keys:command",
}


class _Commands(click.Group):
    """Commands by where they are, as `kvcover.sim.cli` names them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-"):
            raise InputError(f"command router {short(name)}", "no such command", nearest(name, COMMANDS))
        return super().resolve_command(ctx, args)


@click.group("router", cls=_Commands)
def command() -> None:
    """What a router sends, who reads it, and what comes of it. `kvcover routers` lists the recorded ones."""
