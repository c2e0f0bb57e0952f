"""`kvcover doctor`: what is here, what is missing for a tier, and how to get it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Literal

import click

from kvcover.sim.commands.options import tier_option
from kvcover.sim.errors import TierError, nearest
from kvcover.sim.tiers import TIERS


@click.command("doctor")
@tier_option("What is to run", default="connector")
@click.option("--for", "purpose", type=click.Choice(["run", "confirm"]), default="run", show_default=True, help="Which command.")
@click.option("--peer", metavar="HOST:PORT", help="Also see whether something answers there.")
@click.option("--transport", type=click.Choice(["rdma", "xgmi"]), default="rdma", show_default=True, help="What MoRI moves by.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def command(
    tier: str,
    purpose: Literal["run", "confirm"],
    peer: str | None,
    transport: Literal["rdma", "xgmi"],
    as_json: bool,
) -> None:
    """Say what this machine has for each tier, and how to get what is missing.

    Exit code 0 if the tier can run here, 1 if not.
    """
    from kvcover.real_backend.machine.doctor import Place, examine, parse_peer, verdict

    if tier not in TIERS:
        raise TierError("--tier", f"no tier {tier!r}", nearest(tier, TIERS))
    if peer is not None:
        parse_peer(peer)
    lines = examine(Place(peer=peer, transport=transport, purpose=purpose, imports=tier != "model"))
    judged = verdict(lines, tier)
    if as_json:
        click.echo(json.dumps({"tier": tier, "ready": judged.passed, "lines": [dataclasses.asdict(line) for line in lines]}))
    else:
        for line in lines:
            click.echo(line.line(tier))
        click.echo(judged.text or f"the {tier} tier can run here")
    sys.exit(judged.exit_code)
