"""Writes `docs/releases.md` from the release records: `python -m kvcover.sim.releases.docs`. A test checks that it is current."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import RELEASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "releases.md"


class Deduced(NamedTuple):
    """A consequence that was first deduced from the sources: the measured rows that hold it, or why there are none."""

    claim: str
    rows: str
    why_not: str = ""


# `rows` is a part of the ids of rows in tests/data/measured.toml.
DEDUCED = (
    Deduced("a synthesised `transfer_id` differs on both sides, so the transfer never ends (0.28+)", "drop:transfer_id"),
    Deduced("WRITE with unequal, split KV heads is misaligned or out of range (up to 0.32)", "write/p2d4/gqa8"),
    Deduced("0.33.0: a DP size that is too small or 0 gives no session, no message, and decode waits", "set:remote_dp_size=0"),
    Deduced("0.33.0: one request with a refused size raises in prefill's forward on all ranks", "set:remote_tp_size=3"),
    Deduced("0.33.0, key dropped, P4 → D2, MLA: data complete and told, P2 and P3 never report", "write/p4d2/mla/toy+drop:remote_tp_size"),
    Deduced("DP and TP together on one host collide on ports: a rank never starts", "",
            "measured by hand on 0.27.0 and 0.33.0 (rank D1.0 of DP2 × TP2 never starts); a row needs a run, and there is none"),
    Deduced("READ knows no pods: DP ranks beyond the first pod are dialled at dead ports", "", "the harness has one host an engine"),
    Deduced("a stop token at prefill frees the blocks under the writes; up to 0.27 the late report kills the scheduler", "",
            "a row has no stop token; the connector tier plays one (`stop-at-prefill:0`), and 0.24.0 and 0.27.0 die of it, 0.28.0 not"),
    Deduced("up to 0.27 a report after the reaper kills the scheduler", "",
            "it doesn't: seen on 0.24.0 to 0.33.0, such a report names nobody any more"),
    Deduced("0.28 to 0.32: an early release names decode's TP size, so that prefill waits for acks that nobody sends", "",
            "a row has no abort; the connector tier runs one (`abort:0,at=before`)"),
    Deduced("0.33.0: a failure notice does not fence the other writers of a fan-in", "", "needs a transfer that is late on one rank only"),
    Deduced("a WRITE notice for a request that is running kills decode's scheduler", "generating"),
    Deduced("pipeline stages on one host share ports: the second stage of a rank never starts", "",
            "measured by hand on 0.33.0 (a second process with the ports of D0 never starts); the harness has no stages"),
    Deduced("0.33.0: an MLA model with a GQA layer gets the source's first head everywhere under unequal TP", "write/p2d4/mla+gqa8"),
    Deduced("0.33.0: a GQA model with an MLA layer is not written under unequal, split heads, and decode waits", "write/p2d4/gqa8+mla"),
    Deduced("recurrent states: nothing starts up to 0.30, READ at equal TP from 0.31 on, WRITE in 0.33.0", "gqa8+state"),
    Deduced("0.33.0: every prefill rank writes its state, and decode waits for all of them (W = P/D)", "write/p4d1/gqa2+state"),
    Deduced("0.33.0, recurrent states, key dropped, equal TP: the states are not written and decode waits",
            "write/p2d2/gqa8+state/toy+drop:remote_tp_size"),
    Deduced("READ of recurrent states without a TP size in decode's leg kills decode up to 0.32", "drop:tp_size@decode"),
    Deduced("the state that decode gets is one of all tokens but the last (`_p_side_truncated`)", "mla+state"),
    Deduced("unequal pools force 0.33.0 to write head by head at equal TP: the same cells, more work requests", "",
            "coverage is the same either way, and work requests are not in a row"),
)  # fmt: skip


def page() -> str:
    """The whole page as Markdown."""
    rows = tomllib.loads((ROOT / "tests" / "data" / "measured.toml").read_text(encoding="utf-8"))["row"]
    measured = Counter(row["release"] for row in rows)
    names = list(RELEASES)
    lines = [
        "# What differs between releases",
        "",
        "Written from the records in `sim/releases/records.py` by `python -m kvcover.sim.releases.docs`; do not edit. A release names one policy",
        "a field; `=` is the policy of the release to its left. `reference` is a connector that is right or refuses.",
        "",
        "| policy | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        "| rows measured | " + " | ".join(str(measured[name]) if measured[name] else "–" for name in names) + " |",
    ]
    for field in FIELDS:
        cells, before = [], ""
        for record in RELEASES.values():
            value = getattr(record, field)
            cells.append("=" if value == before else value)
            before = value
        lines.append(f"| {field} | " + " | ".join(cells) + " |")
    lines += ["", "## What the names mean", ""]
    for field, subject in FIELDS.items():
        lines += [f"**{field}**", "", *(f"- `{name}`: {policy.text}" for name, policy in subject.policies.items())]
        lines += ["", f"First seen in {', '.join(f'`{kind}`' for kind in subject.decides)}.", ""]
    lines += ["## What was deduced before it was measured", "", "| consequence | on the real connector |", "|---|---|"]
    for deduced in DEDUCED:
        count = sum(deduced.rows in row["id"] for row in rows) if deduced.rows else 0
        found = f"measured: {count} rows with `{deduced.rows}`" if count else f"not measured: {deduced.why_not}"
        lines.append(f"| {deduced.claim} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
