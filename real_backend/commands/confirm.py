"""`kvcover confirm`: does one release repair what another breaks?"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcover.sim.commands.options import choose_mori, field_options, scenario_data, sizes
from kvcover.sim.errors import InputError
from kvcover.sim.tiers import load_tier

if TYPE_CHECKING:
    from kvcover.real_backend.evidence.confirm import Confirmation
    from kvcover.real_backend.evidence.folder import Folder


@click.command("confirm")
@click.argument("files", nargs=-1, metavar="[SCENARIO | BEFORE.json AFTER.json]")
@click.option("--before", metavar="R|PATH|installed", help="The vLLM that should be bad.")
@click.option("--after", metavar="R|PATH|installed", help="The vLLM that should be good.")
@click.option(
    "--report", metavar="ID", help="Before must show what this public report says, e.g. 'vllm#47764'; see `kvcover corpus`."
)
@click.option(
    "--expect-before",
    metavar="FIELD=VALUE,…",
    help="Before must show this: outcome=corrupt,coverage=0.125,by_rank=1+0,told=D0+D1 (default: what the model says).",
)
@click.option("--mode", metavar="write|read", help="Prefill pushes (default) or decode pulls.")
@click.option("--prefill", metavar="tp=N[,dp=N]", help="Size of the prefill engine.")
@click.option("--decode", metavar="tp=N[,dp=N]", help="Size of the decode engine.")
@field_options
@click.option("-o", "--output", metavar="DIR", help="Leave all evidence in a new folder, also if it fails.")
def command(files: tuple[str, ...], before: str | None, after: str | None, **options: Any) -> None:
    """Run one scenario on two vLLMs, or take two results of it that `kvcover run -o FILE` wrote.

    CONFIRMED if before shows the expected fault, rank by rank, and after passes as `kvcover run --check` does. Before that is
    bad in another way is INCONCLUSIVE. On the model tier, which is the default, nothing real runs, and the verdict is
    PREDICTED.

    Exit code 0 if confirmed or predicted, 1 if not, 3 if nothing can be concluded. Examples:

    \b
      kvcover confirm --before 0.26.0 --after 0.27.0 --tier connector --prefill tp=8 --decode tp=8 --model deepseek-v3
      kvcover confirm --before 0.26.0 --after 0.27.0 --tier connector --report 'vllm#47764'
      kvcover confirm before.json after.json -o evidence
    """
    from kvcover.real_backend.evidence.expected import early

    early(options["report"], options["expect_before"], before)
    said = shlex.join(["kvcover", *sys.argv[1:]])
    if before is None and after is None:
        done = _two_results(files, options, said)
    elif before is None or after is None:
        raise InputError("--before" if before is None else "--after", "is missing", "name both vLLMs, or give two result files")
    else:
        done = _two_runs(files, before, after, options, said)
    from kvcover.real_backend.evidence.confirm import EXIT_CODES

    if options["as_json"]:
        click.echo(json.dumps(done.evidence(), ensure_ascii=False))
    else:
        _show(done, options["output"])
    sys.exit(EXIT_CODES[done.verdict])


def _two_runs(files: tuple[str, ...], before: str, after: str, options: dict[str, Any], said: str) -> Confirmation:
    from kvcover.real_backend.evidence import confirm
    from kvcover.real_backend.evidence.expected import find_report

    if len(files) > 1:
        raise InputError(
            files[1], "is one file too many beside --before and --after", "give one scenario, or two results without them"
        )
    if not files and options["report"] is not None:
        data = _data(None, options, find_report(options["report"]).scenario)
    else:
        data = _data(files[0] if files else None, options, {})
    choose_mori(load_tier(options["tier"]), options["mori"])
    planned = confirm.plan(data, before, after, options["tier"])
    planned.check()
    runs = list(zip(planned.scenarios, planned.vllms, strict=True))
    with _evidence(options["output"], said, options["tier"], runs) as folder:
        results = planned.run()
        return _judged(confirm, results, options, folder)


def _two_results(files: tuple[str, ...], options: dict[str, Any], said: str) -> Confirmation:
    from kvcover.real_backend.evidence import confirm

    if len(files) != 2:
        raise InputError("confirm", f"{len(files)} files and no vLLM", "name --before and --after, or give two result files")
    context = click.get_current_context()
    kept = ("report", "expect_before", "as_json", "output", "files", "before", "after")
    for param in context.command.params:
        if param.name and param.name not in kept and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise InputError(param.opts[0], "is of a scenario that is yet to run", "leave it out, or name --before and --after")
    results = confirm.read_pair(*files)
    with _evidence(options["output"], said, results[0].tier, []) as folder:
        return _judged(confirm, results, options, folder)


def _judged(confirm: Any, results: Any, options: dict[str, Any], folder: Folder | None) -> Confirmation:
    before, after = results
    if folder is not None:
        folder.add("before", before)
        folder.add("after", after)
    expected = confirm.expect(before, options["report"], options["expect_before"])
    done: Confirmation = confirm.conclude(before, after, expected)
    if folder is not None:
        folder.verdict = f"{done.verdict}: {done.reason}"
        folder.write("confirmation.json", done.evidence())
    return done


def _data(file: str | None, options: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The scenario without releases, which give way to --before and --after."""
    data = {**base, **scenario_data(file, options)}
    for name in ("release", "decode_release"):
        data.pop(name, None)
    if options["mode"] is not None:
        data["mode"] = options["mode"]
    for name in ("prefill", "decode"):
        if found := sizes(f"--{name}", options[name]):
            data[name] = {**(data.get(name) or {}), **found}
    return data


def _evidence(
    path: str | None, said: str, tier: str, runs: list[tuple[Any, str | None]]
) -> contextlib.AbstractContextManager[Folder | None]:
    if path is None:
        return contextlib.nullcontext()
    from kvcover.real_backend.evidence.folder import keeping

    return keeping(path, said, tier, runs)


def _show(done: Confirmation, output: str | None) -> None:
    click.echo(f"{done.verdict}: {done.reason}")
    from kvcover.sim.results.result import mori_text

    backend = done.before.backend
    real = f", {mori_text(backend)}" if backend else ": nothing real ran; --tier connector runs vLLM's own connector"
    click.echo(f"{done.before.tier} tier{real}, scenario sha256 {done.sha256[:16]}")
    for when, result in (("before", done.before), ("after", done.after)):
        click.echo(f"{when:>7}: {result.release}: {result.replay}")
    if output:
        click.echo(f"evidence: {output}")
