"""`kvcover mori`: AMD's own `mori.io` for the connector tier."""

from __future__ import annotations

import click


@click.group("mori")
def command() -> None:
    """Add and list the versions of AMD's own mori.io that `--tier connector --mori library` runs, over a NIC in software.

    The amd-mori wheel is fetched as data, and never installed. Nothing runs it unless `--mori` says so.
    """


@command.command("add")
@click.argument("version", metavar="VERSION")
def add(version: str) -> None:
    """Fetch the wheel of a version such as 1.2.4, and build what it needs with this machine's compiler."""
    from kvcover.real_backend.machine import mori

    made = mori.add(version, lambda line: click.echo(line, err=True))
    click.echo(f"mori.io {made.version} is ready: kvcover run --tier connector --mori {made.version}")


@command.command("list")
def list_() -> None:
    """List the versions that can be added, and those that are here."""
    from kvcover.real_backend.machine import mori

    here = {each.version: each for each in mori.added()}
    for version in mori.WHEELS:
        click.echo(f"{version:12} {here[version].folder if version in here else '-'}")
    if lacks := mori.missing():
        click.echo(f"none can be built here: that needs {lacks}")
