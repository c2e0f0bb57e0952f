"""A group of commands that are loaded when they are asked for, by a table of where they are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from kvcover.sim.errors import InputError, nearest, short


class LazyGroup(click.Group):
    """`table`: each command's name, and where it is as `module:name`. A name that is none of them is one line and exit code 2."""

    def __init__(self, *args: Any, table: Mapping[str, str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in self._table and not name.startswith("-"):
            group = f"{ctx.info_name} " if ctx.parent else ""
            raise InputError(f"command {group}{short(name)}", "no such command", nearest(name, self._table))
        return super().resolve_command(ctx, args)
