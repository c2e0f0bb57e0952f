"""What an exploration says: in a terminal, as JSON, as JUnit, and as a file for each kind of failure."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcover.sim.commands.gating import write_junit
from kvcover.sim.commands.options import write_output

if TYPE_CHECKING:
    from kvcover.sim.search.failures import Exploration, FailureGroup
    from kvcover.sim.tiers import Tier

_SHOWN_GROUPS = 20


class Report:
    """Of one exploration. `stream` writes examples as groups are found, `show` all that is to say when it is over."""

    def __init__(self, tier: Tier, options: dict[str, Any]) -> None:
        self._tier, self._options = tier, options
        self._written: dict[str, tuple[int, ...]] = {}

    def stream(self, summary: Exploration) -> None:
        """Write examples of groups that are new, or have a smaller one now."""
        if self._options["out"] is not None:
            self._write(summary.ranked())

    def _write(self, groups: list[FailureGroup], shrunk: bool = False) -> list[str]:
        """One file a group, named after its signature, so that it keeps its name as more is found."""
        from kvcover.sim.search.explore_tier import failure_text

        paths = []
        for group in groups:
            path = str(Path(self._options["out"]) / _file_name(group, shrunk))
            if self._written.get(path) != group.size:
                write_output(path, failure_text(self._tier, group, self._options["vllm"]), "--out")
                self._written[path] = group.size
            paths.append(path)
        return paths

    def _examples(self, summary: Exploration, groups: list[FailureGroup]) -> list[str]:
        """The files of all groups; shrinking gives some another name, and the file under the old one goes."""
        if self._options["out"] is None:
            return []
        if not summary.shrunk:
            return self._write(groups)
        before, self._written = set(self._written), {}
        paths = self._write(groups, shrunk=True)
        for path in before - set(paths):
            Path(path).unlink(missing_ok=True)
        return paths

    def show(self, summary: Exploration) -> None:
        """Write the examples, then say what was found; examples that are shown are those that are written."""
        from kvcover.sim.search.failures import said

        groups = summary.ranked()
        paths = self._examples(summary, groups)
        text = self._as_json(summary, groups, paths)
        write_output(self._options["output"], text)
        self._junit(summary, groups)
        if self._options["as_json"]:
            click.echo(text, nl=False)
            return
        for line in _counts(summary):
            click.echo(line)
        beside = f" worse than in {self._options['baseline']}" if self._options["baseline"] else ""
        click.echo(f"{summary.failures} failures{beside} of {len(groups)} kinds" + (":" if groups else ""))
        for index, group in enumerate(groups[:_SHOWN_GROUPS]):
            self._show_group(group, paths[index] if paths else None)
        if len(groups) > _SHOWN_GROUPS:
            where = "all are in " + self._options["out"] if paths else "--out DIR writes all of them"
            click.echo(f"and {len(groups) - _SHOWN_GROUPS} kinds more; {where}")
        note = " of what was drawn and of the model's runs; real runs take real time, and have none"
        moot = sum(summary.moot.values())
        nothing = f"; {moot} of {summary.runs} runs showed nothing ({said(summary.moot)})" if moot else ""
        click.echo(f"{summary.passed} passed{nothing}")
        click.echo(f"digest {summary.digest}{'' if self._tier.can.virtual_time else note}")

    def _show_group(self, group: FailureGroup, path: str | None) -> None:
        from kvcover.sim.search.explore_tier import again

        found = group.signature
        kinds = ", ".join(found.kinds) or "no finding"
        click.echo(f"- {found.outcome} ×{group.count}, {found.release}, {found.mode}: {kinds}")
        click.echo(f"    smallest: {group.name}, with {', '.join(group.shape)}")
        click.echo(f"    {again(self._tier, group, path, self._options['vllm'])}")

    def _as_json(self, summary: Exploration, groups: list[FailureGroup], paths: list[str]) -> str:
        import msgspec

        from kvcover.sim.search.explore_tier import again

        rows = []
        for index, group in enumerate(groups):
            file = paths[index] if paths else None
            told = {"shape": list(group.shape), "count": group.count, "name": group.name, "scenario": group.draft}
            replay = again(self._tier, group, None, self._options["vllm"])
            rows.append({**msgspec.to_builtins(group.signature), **told, "file": file, "replay": replay})
        whole = {
            "schema": 1, "runs": summary.runs, "outcomes": summary.outcomes, "failures": summary.failures,
            "groups": rows, "digest": summary.digest, "stopped": summary.stopped, "ended": summary.ended,
            "skipped": summary.skipped, "varied": summary.varied, "unsettled": summary.unsettled, "known": summary.known,
            "passed": summary.passed, "moot": summary.moot,
        }  # fmt: skip
        return json.dumps(whole) + "\n"

    def _junit(self, summary: Exploration, groups: list[FailureGroup]) -> None:
        """One case a kind of failure, or one for all runs if none failed."""
        from kvcover.sim.results.gate import Cell
        from kvcover.sim.results.verdict import fail, inconclusive
        from kvcover.sim.search.explore import BUDGET
        from kvcover.sim.search.explore_tier import again

        verdict = summary.verdict(whole=self._options["grid"] is not None)
        if verdict.status != "fail" and summary.ended not in ("", BUDGET):
            verdict = inconclusive(summary.ended)
        cells = [
            Cell(name=f"{g.signature.outcome} {g.signature.mode} {', '.join(g.signature.kinds)}",
                 verdict=fail(f"{g.count} runs, smallest: {g.name}, with {', '.join(g.shape)}"),
                 replay=again(self._tier, g, None, self._options["vllm"]))
            for g in groups
        ]  # fmt: skip
        if not cells:
            cells = [Cell(name=f"{summary.runs} runs", verdict=verdict, seconds=summary.seconds)]
        write_junit(self._options["junit"], "kvcover explore", cells, verdict)


def _counts(summary: Exploration) -> list[str]:
    """How many runs ended how, and which of them say nothing."""
    from kvcover.sim.results.result import MEANING, OUTCOMES

    kinds = (*OUTCOMES, "error", "differs", "invalid", "skipped")
    counts = [f"{summary.outcomes[name]} {name}" for name in kinds if name in summary.outcomes]
    lines = [f"{summary.runs} runs{' before ' + summary.ended if summary.ended else ''}: {', '.join(counts) or 'none'}"]
    if vacuous := summary.outcomes.get("vacuous"):
        lines.append(f"{vacuous} vacuous: {MEANING['vacuous']}; not counted as passes")
    if summary.invalid:
        lines.append(f"invalid, so not run: {summary.invalid}")
    if summary.skipped:
        reason, count = max(summary.skipped.items(), key=lambda item: item[1])
        lines.append(f"skipped: {sum(summary.skipped.values())}, most often ({count}) for: {reason}; not counted as passes")
    if summary.varied:
        lines.append(f"{summary.varied} runs differed from the model and agreed when run again: the connector's own timing varies")
    if summary.unsettled:
        lines.append(f"{summary.unsettled} runs were not settled in time, and are not counted")
    if summary.known:
        lines.append(f"{summary.known} bad runs are no worse than in the baseline")
    return lines


def _file_name(group: FailureGroup, shrunk: bool) -> str:
    """`corrupt-0.26.0-write-1a2b3c4d.toml`: plain letters, whatever a release is called."""
    found = group.signature
    key = json.dumps([found.outcome, found.release, found.mode, list(found.kinds), list(group.shape) if shrunk else []])
    words = f"{found.outcome}-{found.release.replace(' → other', '-skew')}-{found.mode}"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', words)}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}.toml"
