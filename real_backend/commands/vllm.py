"""`kvcover vllm`: the vLLM source trees that the connector tier runs."""

from __future__ import annotations

import contextlib
import os

import click

from kvcover.sim.errors import TierError


@click.group("vllm")
def command() -> None:
    """Add, list and remove the vLLM source trees that `--tier connector` runs.

    A release is installed without kernels, from its official source, into a cache of yours; nothing is installed over an
    existing vLLM, torch or mori.
    """


@command.command("add")
@click.argument("release_or_path", metavar="RELEASE|PATH")
def add(release_or_path: str) -> None:
    """Install a release such as 0.27.0, or register a working copy of vLLM at PATH."""
    from kvcover.real_backend.machine import trees

    path = trees.path_of(release_or_path, "vllm add")
    if os.sep in release_or_path or (path.is_dir() and not trees.is_release(release_or_path)):
        tree = trees.add_working_copy(path)
        click.echo(f"registered the working copy {tree.path} ({tree.version or 'version unknown'})")
        return
    tree = trees.add_release(release_or_path, lambda line: click.echo(line, err=True))
    click.echo(f"vLLM {tree.version} is ready: kvcover run --tier connector --vllm {tree.version}")


@command.command("list")
def list_() -> None:
    """List the trees that are known here."""
    from kvcover.real_backend.machine import trees

    known = trees.trees()
    with contextlib.suppress(TierError):
        known.append(trees.installed())
    for tree in known:
        size = f"{trees.folder_mb(tree.path):5} MB" if tree.path and tree.kind == "cache" else " " * 8
        told = "" if tree.label == tree.version else f"  {tree.identity.text} by its connector's files"
        click.echo(f"{tree.version or 'unknown':12} {tree.kind:12} {size}  {tree.path or '--vllm installed'}{told}")
    if not known:
        from kvcover.sim.releases.records import NEWEST

        click.echo(f"no vLLM here; get one with `kvcover vllm add {NEWEST}`")


@command.command("remove")
@click.argument("release_or_path", metavar="RELEASE|PATH")
def remove(release_or_path: str) -> None:
    """Delete a release from the cache, or forget a working copy (which stays where it is)."""
    from kvcover.real_backend.machine import trees

    tree = trees.remove(release_or_path)
    what = f"vLLM {tree.version}" if tree.kind == "cache" else f"the working copy {tree.path}"
    click.echo(f"removed {what}" if tree.kind == "cache" else f"forgot {what}")
