"""`kvcover report`: results as a page, a picture or Markdown."""

from __future__ import annotations

from pathlib import Path

import click

from kvcover.sim.commands.options import check_output, write_output
from kvcover.sim.errors import InputError, nearest, short

_KINDS = (".html", ".md", ".png")


@click.command("report")
@click.argument("results", nargs=-1, required=True, metavar="RESULT…")
@click.option("-o", "--output", required=True, metavar="FILE", help="What to write, by its name: report.html, pr.md or matrix.png.")
@click.option("--baseline", metavar="FILE", help="Results to compare with: tell what is worse, and what is better.")
def command(results: tuple[str, ...], output: str, baseline: str | None) -> None:
    """Make a report of results for people: one page that needs no network, Markdown for a pull request, or a picture.

    RESULT is what `run`, `matrix`, `corpus`, `compat`, `explore` or `confirm` wrote with --json or -o, or - for standard input.
    Several are one report, with release against release where they are of more than one. Examples:

    \b
      kvcover matrix --release 0.26.0 -o old.json && kvcover matrix --release 0.27.0 -o new.json
      kvcover report old.json new.json -o report.html
      kvcover report new.json --baseline old.json -o pr.md
    """
    kind = Path(output).suffix
    if kind not in _KINDS:
        hint = nearest(kind, _KINDS) if kind else "end it in .html, .md or .png"
        raise InputError("-o", f"{short(output)} is no page, Markdown or picture by its name", hint)
    check_output(output, *results, baseline)
    from kvcover.sim.report.gather import gather

    material = gather(results)
    before = [] if baseline is None else gather([baseline]).runs
    if baseline is not None and not before:
        raise InputError("--baseline", f"{short(baseline)} holds no runs to compare with", "give what `kvcover matrix -o` wrote")
    if kind == ".png":
        from kvcover.sim.report.picture import picture

        write_output(output, picture(material, ", ".join(results)))
    elif kind == ".md":
        from kvcover.sim.report.markdown import markdown

        write_output(output, markdown(material, before))
    else:
        from kvcover.sim.report.page import page

        write_output(output, page(material, before))
