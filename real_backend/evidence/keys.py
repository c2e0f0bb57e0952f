"""Bad keys on the real connector: `python -m kvcover.real_backend.evidence.keys --out tests/data/measured_keys.jsonl`.

Runs what `kvcover router keys` tells of from the model (`kvcover.sim.search.keys`) on the connector tier, and writes one line a
case: what was wrong, and how each request ended. Cases that are in the file already are not run again, so that a long run can
go on another day. Of a key that no engine asks for, by the model, only a value of another type is run: it would show if it did.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.errors import TierError
from kvcover.sim.results.result import Result
from kvcover.sim.search.keys import KeyCase, key_cases
from kvcover.sim.simulate import run

RELEASES = ("0.27.0", "0.32.0", "0.33.0")
_BATCH = 24
_MORE_RUNS = 2
_SETS = ("written", "told", "prefill_told", "prefill_released")
Line = dict[str, Any]


def cases(release: str) -> Iterator[KeyCase]:
    """The cases of one release that are measured."""
    for mode in ("write", "read"):
        for case in key_cases(release, mode):
            if case.scenario is not None and (case.read or case.trouble == "wrong type"):
                yield case


def line_of(case: KeyCase, result: Result) -> Line:
    """What is compared: how each request ended, and what each decode rank had."""
    return {
        "id": case.id,
        "fault": case.fault,
        "by_request": result.by_request,
        "coverage": [rank.coverage for rank in result.by_rank],
        **{name: getattr(result.sets, name) for name in _SETS},
    }


def measure(release: str, done: set[str]) -> Iterator[Line]:
    """Run the cases that are not done; one that differs from the model in its outcomes is run again, as machines are busy."""
    planned = [case for case in cases(release) if case.id not in done]
    fired = _fired(planned)
    while batch := list(itertools.islice(fired, _BATCH)):
        open_cases = {case.id: case for case, _ in batch}
        model = {case.id: by_request for case, by_request in batch}
        seen: dict[str, list[Line]] = {name: [] for name in open_cases}
        for _ in range(1 + _MORE_RUNS):
            scenarios = [case.scenario for case in open_cases.values() if case.scenario is not None]
            results = connector_tier.many(scenarios, keep_errors=True) if scenarios else []
            for case, result in zip(list(open_cases.values()), results, strict=True):
                if isinstance(result, TierError):
                    print(f"{case.id}: {result}", file=sys.stderr, flush=True)
                    continue
                seen[case.id].append(line_of(case, result))
                if result.by_request == model[case.id]:
                    del open_cases[case.id]
        for lines in seen.values():
            if lines:
                outcomes = [line["by_request"] for line in lines]
                yield lines[-1] | {"runs": len(lines), **({"varied": outcomes} if any(o != outcomes[-1] for o in outcomes) else {})}


def _fired(planned: Sequence[KeyCase]) -> Iterator[tuple[KeyCase, list[str]]]:
    """Those whose fault changes a leg, with what the model says of their requests."""
    for case in planned:
        assert case.scenario is not None
        result = run(case.scenario)
        if result.outcome != "vacuous":
            yield case, result.by_request


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m kvcover.real_backend.evidence.keys", description=__doc__)
    parser.add_argument("--release", action="append", choices=RELEASES, help="only this release; repeatable")
    parser.add_argument("--most", type=int, help="end after so many cases of a release")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON Lines, to go on from")
    options = parser.parse_args(arguments)
    lines = read(options.out)
    done = {line["id"] for line in lines}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    with options.out.open("a", encoding="utf-8") as out:
        for release in options.release or RELEASES:
            for line in itertools.islice(measure(release, done), options.most):
                print(json.dumps(line | {"date": today}), file=out, flush=True)
    return 0


def read(path: Path) -> list[Line]:
    """The lines of a file, none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
