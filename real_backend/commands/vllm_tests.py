"""`kvcover vllm-tests`: vLLM's own tests of its connector, over the loopback."""

from __future__ import annotations

import dataclasses
import json

import click

from kvcover.sim.commands.options import choose_mori, conclude, mori_option
from kvcover.sim.tiers import load_tier


def _unrun(skipped: int, reasons: dict[str, int]) -> str:
    """What the closing line says of tests that did not run: they show nothing."""
    if not skipped:
        return ""
    why, times = next(iter(reasons.items()), ("", 0))
    because = f", {times} of them for: {why}" if times else ""
    return f"; NOT RUN: {skipped} skipped, which show nothing{because}"


@click.command("vllm-tests")
@click.argument("release")
@click.option("--vllm", metavar="R|PATH|installed", help="vLLM tree to test (default: the one of RELEASE; see `kvcover vllm`).")
@mori_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(release: str, vllm: str | None, mori: str | None, as_json: bool) -> None:
    """Run vLLM's own MoRI-IO unit tests of RELEASE over the loopback mori.io, or what --mori names, and count what passed.

    Exit code 1 if a test failed, 3 if none passed. Needs the connector and test extras.
    """
    from kvcover.real_backend.machine.mori import chosen
    from kvcover.real_backend.machine.vllm_tests import find_tree, run_tests
    from kvcover.sim.results.result import real_mori

    choose_mori(load_tier("connector"), mori)
    library = chosen()
    report = run_tests(release, find_tree(release, vllm))
    failed = report.total("failed")
    if as_json:
        totals = {field: report.total(field) for field in ("passed", "failed", "skipped")}
        click.echo(json.dumps(dataclasses.asdict(report) | totals))
    else:
        over = real_mori(library.version) if library else "the loopback mori.io"
        click.echo(f"vLLM {release}: its own unit tests of the MoRI-IO connector, over {over}")
        width = max((len(count.file) for count in report.files), default=0)
        for count in report.files:
            click.echo(f"  {count.file:{width}}  {count.passed:4} passed {count.failed:4} failed {count.skipped:4} skipped")
        for why, times in report.reasons.items():
            click.echo(f"  {times} skipped: {why}")
        for failure in report.failures:
            click.echo(f"  failed: {failure}")
        passed, skipped = report.total("passed"), report.total("skipped")
        click.echo(f"{passed} passed, {failed} failed in {report.seconds:.0f} s{_unrun(skipped, report.reasons)}")
    conclude(report.verdict)
