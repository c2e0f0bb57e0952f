"""`kvcover releases`, `models`, `routers` and `faults`: what there is to choose from."""

from __future__ import annotations

import json
from typing import Any

import click

from kvcover.sim.errors import InputError

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.command("releases")
@click.argument("names", nargs=-1)
@click.option("--all", "show_all", is_flag=True, help="Show also the policies in which they do not differ.")
@_json_option
def releases(names: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """Show connector releases side by side; what changed from the one before is marked with *.

    NAMES picks releases, e.g. `kvcover releases 0.26.0 0.27.0`; without, every policy is listed with the releases
    that follow it.
    """
    import msgspec

    from kvcover.sim.releases.records import RELEASES, get_release

    records = [get_release(name, "releases") for name in names] or list(RELEASES.values())
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(record) for record in records]))
        return
    from kvcover.sim.commands.show_lists import show_releases

    show_releases(records, by_policy=not names, show_all=show_all)


@click.command("models")
@_json_option
def models(as_json: bool) -> None:
    """List model presets with the geometry of their KV cache and its source."""
    import msgspec

    from kvcover.sim.cache.presets import PRESETS

    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(preset) for preset in PRESETS.values()]))
        return
    from kvcover.sim.commands.show_lists import show_models

    show_models(list(PRESETS.values()))


@click.command("routers")
@click.option("--mode", default="write", show_default=True, metavar="write|read", help="Which legs to show.")
@_json_option
def routers(mode: str, as_json: bool) -> None:
    """List routers and the kv_transfer_params that each sends on both legs."""
    import msgspec

    from kvcover.sim.scenario.routers import ROUTERS

    if mode not in ("write", "read"):
        raise InputError("--mode", f"no mode {mode!r}", "use write or read")
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(router) for router in ROUTERS.values()]))
        return
    from kvcover.sim.commands.show_lists import show_routers

    show_routers(list(ROUTERS.values()), mode)


@click.command("faults")
@_json_option
def faults(as_json: bool) -> None:
    """List fault kinds: how to write them, where they act, on which tiers, and the public report behind each."""
    import msgspec

    from kvcover.faults import KINDS
    from kvcover.sim.tiers import injecting

    if as_json:
        rows: list[Any] = [{**msgspec.to_builtins(kind), "tiers": injecting(kind.name)} for kind in KINDS.values()]
        click.echo(json.dumps(rows))
        return
    from kvcover.sim.commands.show_lists import show_faults

    show_faults(list(KINDS.values()))
