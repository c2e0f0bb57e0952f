"""`kvcover schema`: what scenario and result files hold, for programs that read or write them."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("kind", metavar="scenario|result")
def command(kind: str) -> None:
    """Print the JSON Schema of scenario files, or of the results that --json and -o write, with the units of all numbers.

    It is made of the types that kvcover itself reads and writes with. A file of several results holds an array (.json) or one a
    line (.jsonl).
    """
    from kvcover.sim.results.schemas import schema_of

    click.echo(json.dumps(schema_of(kind), indent=2, ensure_ascii=False))
