"""`kvcover compare`: two result files side by side."""

from __future__ import annotations

import sys
from typing import Any

import click

_WHAT_RAN = ("tier", "release", "decode_release", "router", "findings")


@click.command("compare")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help="Show what is equal as well.")
@click.option("--check", is_flag=True, help="Exit with 1 if they differ in outcome, coverage or sets.")
def command(first: str, second: str, everything: bool, check: bool) -> None:
    """Put two results of `kvcover run -o FILE` side by side; ≠ marks what differs."""
    from kvcover.real_backend.evidence.compare import compare
    from kvcover.real_backend.evidence.reading import read_result

    lines = compare(read_result(first).to_dict(), read_result(second).to_dict())
    shown = [line for line in lines if line.differs or everything or line.name in ("tier", "release", "outcome", "coverage")]
    width = max(len(line.name) for line in shown)
    column = min(40, max(len(_text(line.first)) for line in shown))
    for line in shown:
        click.echo(
            f"{'≠' if line.differs else ' '} {line.name:<{width}}  {_text(line.first):<{column}}  {_text(line.second)}".rstrip()
        )
    differ = [
        line for line in lines if line.differs and line.name not in ("tier", "release", "decode_release", "router", "findings")
    ]
    click.echo(f"{len(differ)} differences" if differ else "no difference in what was seen")
    if check and differ:
        sys.exit(1)


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nobody"
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
