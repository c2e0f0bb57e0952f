"""A session in Markdown, fit for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcover.sim.results.result import RankCoverage, Result, mori_text
from kvcover.sim.results.show import fraction

_MOST_RANKS = 16
_MOST_FINDINGS = 8


def summary(verdict: str, command: str, results: Mapping[str, Result], environment: Mapping[str, Any]) -> str:
    """What was run, what came of it and how to repeat it; `results` by the names of their files."""
    lines = [f"**{_cell(verdict)}**", "", "```console", f"$ {command}", "```", ""]
    if results:
        lines += [*_table(results), *_ranks(results)]
    for name, result in results.items():
        lines += [*_findings(name, result)]
    lines += [
        f"Here: {_cell(versions(environment))}.",
        "",
        "`logs/` holds whole logs, perhaps with names and addresses of this machine.",
    ]
    return "\n".join(lines) + "\n"


def _table(results: Mapping[str, Result]) -> Iterator[str]:
    rows = {
        "vLLM": [_code(result) for result in results.values()],
        "tier": [_tier(result) for result in results.values()],
        "made with": [_made_with(result) for result in results.values()],
        "outcome": [result.outcome for result in results.values()],
        "coverage at go": [f"{result.coverage:.6g}" for result in results.values()],
        "told": [" ".join(result.sets.told) or "nobody" for result in results.values()],
        "checks failed": [_failed(result) for result in results.values()],
        "scenario": [f"{r.mode} P TP{r.prefill['tp']} → D TP{r.decode['tp']}, {r.model}, {r.router}" for r in results.values()],
        "repeat": [f"`{result.replay}`" for result in results.values()],
    }
    yield "| | " + " | ".join(results) + " |"
    yield "|---" * (len(results) + 1) + "|"
    for name, cells in rows.items():
        yield f"| {name} | " + " | ".join(map(_cell, cells)) + " |"
    yield ""


def _code(result: Result) -> str:
    release = result.release if result.release == result.decode_release else f"{result.release} → {result.decode_release}"
    about = (result.backend or {}).get("prefill_vllm") or {}
    said, digest = about.get("vllm"), about.get("connector_sha256")
    return release + (f"; calls itself {said}, connector {digest}" if digest else "")


def _tier(result: Result) -> str:
    backend = result.backend or {}
    more = [mori_text(backend)] if backend.get("mori") else []
    if shown := backend.get("mori_does_not_show"):
        more.append(f"which does not show {', '.join(shown)}")
    more += [_device(backend)] if backend.get("device", "cpu") != "cpu" else []
    more += [f"self-test {backend['self_test']}"] if backend.get("self_test") else []
    more += [str(backend["date"])] if backend.get("date") else []
    return ", ".join([result.tier + (" (a prediction, nothing real ran)" if result.tier == "model" else ""), *more])


def _device(backend: Mapping[str, Any]) -> str:
    """The GPUs that held the caches."""
    return str((backend.get("prefill_vllm") or {}).get("device") or backend["device"])


def _made_with(result: Result) -> str:
    """Where a real result was made: two may be of two containers."""
    return versions((result.backend or {}).get("environment") or {}) or "–"


def versions(environment: Mapping[str, Any]) -> str:
    """Versions and devices in one line."""
    return ", ".join(f"{name} {value}" for name, value in environment.items() if value is not None)


def _failed(result: Result) -> str:
    return ", ".join(check.name for check in result.checks if check.verdict == "fail") or "none"


def _ranks(results: Mapping[str, Result]) -> Iterator[str]:
    yield "| decode rank | " + " | ".join(f"{name}: covered, told" for name in results) + " |"
    yield "|---" * (len(results) + 1) + "|"
    columns = [{(rank.dp, rank.tp): rank for rank in result.by_rank} for result in results.values()]
    names = sorted({key for column in columns for key in column})
    for dp, tp in names[:_MOST_RANKS]:
        yield f"| D{dp}.{tp} | " + " | ".join(_rank(column.get((dp, tp))) for column in columns) + " |"
    if len(names) > _MOST_RANKS:
        yield f"| {len(names) - _MOST_RANKS} more |" + " |" * len(columns)
    yield ""


def _rank(rank: RankCoverage | None) -> str:
    if rank is None or rank.coverage is None:
        return "–"
    return f"{fraction(rank.coverage)}, {'yes' if rank.told else 'no'}"


def _findings(name: str, result: Result) -> Iterator[str]:
    if not result.findings:
        return
    yield f"{name}:"
    yield ""
    for finding in result.findings[:_MOST_FINDINGS]:
        yield f"- {_cell(finding.text)}"
        yield from (f"  - ← {_cell(cause)}" for cause in finding.causes)
    yield ""


def _cell(text: str) -> str:
    """Text that is neither the end of a cell nor of a line, and steers no terminal."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|")
