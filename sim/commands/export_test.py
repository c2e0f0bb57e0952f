"""`kvcover export-test`: a result as a test for vLLM's own tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvcover.sim.commands.options import check_output, write_output
from kvcover.sim.errors import InputError

if TYPE_CHECKING:
    from kvcover.sim.results.result import Result


@click.command("export-test")
@click.argument("result")
@click.option("-o", "--output", metavar="FILE", help="Write the test there, e.g. test_moriio_kvcover.py.")
def command(result: str, output: str | None) -> None:
    """Write a small pytest that runs a result's scenario on the vLLM under test, and passes when its connector is right.

    RESULT is a file written by `kvcover run -o`. What is right is what a correct connector makes of the scenario (the release
    `reference` of the model): nothing worse may come of it, and where that one is ok, ok. Without kvcover the test is skipped.
    """
    check_output(output, result)
    from kvcover.sim.results.read import read_results

    results = read_results(result)
    if len(results) > 1:
        raise InputError(result, f"holds {len(results)} results", "give a file written by `kvcover run -o FILE`")
    text = exported(results[0], result)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_output(output, text)
        click.echo(f"wrote {output}: run it with `pytest {output}` in vLLM's tree, with kvcover and its connector extra there")


def exported(result: Result, place: str) -> str:
    """The test's source. Raises InputError for a result without a scenario, or one that no connector can pass."""
    import json

    from kvcover.sim.results.result import OUTCOMES
    from kvcover.sim.scenario.scenario import build
    from kvcover.sim.simulate import run

    if result.scenario is None:
        raise InputError(place, "keeps no scenario", "give a file written by `kvcover run -o FILE`")
    data = {name: value for name, value in result.scenario.items() if name not in _OF_THE_RUN}
    right = run(build({**data, "release": "reference"}))
    if right.outcome == "vacuous":
        raise InputError(
            place, "a fault of it never fires with a correct connector, so that no test of it can pass", "name another"
        )
    allowed = [right.outcome] if right.outcome == "ok" else list(OUTCOMES[: OUTCOMES.index(right.outcome) + 1])
    seen = _comment(f"{result.outcome}, coverage {result.coverage:.4g}, on vLLM {result.release}, {result.tier} tier")
    return _TEST.format(
        seen=seen,
        replay=_comment(result.replay),
        scenario=json.dumps(data, indent=4),  # ASCII, in which no three quotes stand together
        allowed=json.dumps(allowed).replace("[", "(").replace("]", ",)" if len(allowed) == 1 else ")"),
    )


_OF_THE_RUN = ("release", "decode_release", "overrides", "expect")


def _comment(text: str) -> str:
    """Text of a file in one line of a comment: nothing in it can end that."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_TEST = '''\
# SPDX-License-Identifier: Apache-2.0
"""MoRI-IO: which KV cells does decode get? Written by `kvcover export-test`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

kvcover = pytest.importorskip("kvcover", reason="kvcover is not installed (pip install 'kvcover[connector]')")

# Seen: {seen}
# Again: {replay}
SCENARIO = json.loads(
    r"""
{scenario}
"""
)
# What a correct connector may make of it.
ALLOWED = {allowed}


def vllm_under_test() -> str:
    """The folder that holds the vllm/ that this test would import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "no vLLM can be imported here"
    return str(Path(next(iter(spec.submodule_search_locations))).parent)


def test_decode_gets_its_kv() -> None:
    vllm = vllm_under_test()
    tier = kvcover.load_tier("connector")
    scenario: dict[str, Any] = {{**SCENARIO}}
    if release := tier.release_of(vllm):
        scenario["release"] = release
    built = kvcover.build(scenario)
    try:
        tier.check(built, vllm)
    except kvcover.TierError as error:
        pytest.skip(f"kvcover's connector tier can't run this here: {{error}}")
    result = tier.run(built, vllm)
    told = f"{{result.outcome}}, coverage {{result.coverage:.4g}}; " + "; ".join(f.text for f in result.findings)
    assert result.outcome in ALLOWED, told
    verdict = kvcover.judge_run(result, kvcover.Expect(outcome=result.outcome))
    assert verdict.status == "pass", verdict.text
'''
