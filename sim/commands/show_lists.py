"""Tables of what there is to choose from."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from kvcover.faults import FaultKind
from kvcover.faults.events import MESSAGES
from kvcover.sim.cache.presets import DTYPE_BYTES, Preset
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import REFERENCE, ConnectorRelease
from kvcover.sim.results.show import console, hanging
from kvcover.sim.scenario.routers import Router
from kvcover.sim.tiers import injecting


def show_releases(records: list[ConnectorRelease], by_policy: bool, show_all: bool) -> None:
    """Either every policy with the releases that follow it, or the named releases side by side."""
    if by_policy:
        _show_by_policy(records, show_all)
    else:
        _show_side_by_side(records, show_all)


def _differs(records: list[ConnectorRelease], field: str) -> bool:
    return len({getattr(record, field) for record in records}) > 1


def _show_by_policy(records: list[ConnectorRelease], show_all: bool) -> None:
    out = console()
    for field, subject in FIELDS.items():
        if not (show_all or _differs(records, field)):
            continue
        out.print(Text(field, style="bold"))
        for name, policy in subject.policies.items():
            followers = _runs([getattr(record, field) == name for record in records], [r.name for r in records])
            if followers or show_all:
                out.print(Text(f"  {name}: {followers or 'no release'}"))
                out.print(Text(f"      {policy.text}", style="dim"))


def _runs(flags: list[bool], names: list[str]) -> str:
    """`0.24.0–0.26.0, 0.33.0` for the flagged names, in their order."""
    parts: list[list[str]] = []
    for index, flag in enumerate(flags):
        if flag and index and flags[index - 1] and names[index] != REFERENCE:
            parts[-1].append(names[index])
        elif flag:
            parts.append([names[index]])
    return ", ".join(part[0] if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


_POLICY_WIDTH, _RELEASE_WIDTH = 28, 19  # of a column with its borders: the longest field, and enough to read a policy


def _show_side_by_side(records: list[ConnectorRelease], show_all: bool) -> None:
    """As many tables as it takes for the columns to be read."""
    out = console()
    fields = [field for field in FIELDS if show_all or _differs(records, field) or len(records) == 1]
    if not fields:
        out.print(f"{', '.join(record.name for record in records)}: no policy differs")
        return
    per_table = max(1, (out.width - _POLICY_WIDTH) // _RELEASE_WIDTH)
    for start in range(0, len(records), per_table):
        table = Table(show_lines=False)
        table.add_column("policy", no_wrap=True)
        part = range(start, min(start + per_table, len(records)))
        for index in part:
            table.add_column(records[index].name, overflow="fold")
        for field in fields:
            table.add_row(field, *(_policy_cell(records, index, field) for index in part))
        out.print(table)
    out.print("* differs from the release before it; `kvcover releases` explains the names")


def _policy_cell(records: list[ConnectorRelease], index: int, field: str) -> Text:
    value = getattr(records[index], field)
    changed = index > 0 and value != getattr(records[index - 1], field)
    return Text(f"* {value}" if changed else value, style="bold" if changed else "")


def show_models(presets: list[Preset]) -> None:
    """Geometry and source of each preset; `other` says how many layers attend to the last so many tokens, or keep a state."""
    out = console()
    table = Table()
    for column in ("model", "layers", "other", "KV heads", "head", "bytes/token/layer"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for preset in presets:
        g = preset.geometry
        sliding = sum(window > 0 for window in g.windows)
        states = len(g.minor_layers) if g.has_states else 0
        other = f"{sliding} × {g.window}" if sliding else f"{states} × state" if states else ""
        table.add_row(preset.name, str(g.layers), other,
                      "MLA" if g.mla else str(g.kv_heads), str(g.head_dim),
                      str(g.planes * g.kv_heads * g.head_dim * DTYPE_BYTES["bf16"]))  # fmt: skip
    out.print(table)
    out.print("bytes for bf16, of all heads together; sources:")
    for preset in presets:
        out.print(Text(f"  {preset.name}: {preset.source}"))


def show_routers(routers: list[Router], mode: str) -> None:
    """Each leg's params; values with $ are filled in at run time."""
    out = console()
    for router in routers:
        out.print(Text(router.name, style="bold"))
        for side, template in zip(("prefill", "decode"), router.legs(mode), strict=True):
            whole = side == "decode" and mode == "read" and router.forwards_response
            forwarded = " (over prefill's whole answer)" if whole else ""
            out.print(Text(f"  {side} leg{forwarded}: " + ", ".join(f"{k}={_value(v)}" for k, v in template.items())))
        pinned = [side for side in ("prefill", "decode") if f"{mode}_{side}" in router.pins]
        if pinned:
            out.print(Text(f"  remote_dp_rank on the {' and '.join(pinned)} leg when the other side has several DP ranks"))
        if router.decode_follows:
            out.print(
                Text("  when prefill has several DP ranks, the decode leg goes to the same one; decode rejects it if it has fewer")
            )
        out.print(Text(f"  source: {router.source}", style="dim"))


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def show_faults(kinds: list[FaultKind]) -> None:
    """Each kind with its syntax, parameters, point, tiers and the report that motivates it."""
    out = console()
    for kind in kinds:
        out.print(Text(kind.name, style="bold").append(f"  {kind.syntax}", style=""))
        tiers = ", ".join(injecting(kind.name))
        out.print(hanging("    ", f"{kind.text}; acts at {kind.point}, on tiers {tiers}; seen in {kind.report}"))
        if kind.params:
            out.print(hanging("    takes ", ", ".join(kind.params)))
    for line in (
        "Key faults: without @LEG on both legs; #0#2 are requests 0 and 2, #2+ all from 2 on, without # every request.",
        "swap in READ: decode's leg is made from prefill's answer, so the prefill leg gets what decode would be sent without one.",
        f"MESSAGE is one of {', '.join(MESSAGES)}; RANK is P0, D3, or P1.0 with several DP ranks; REQUEST is a number from 0.",
        "from and to take a rank or a whole side (P, D); n is which matching event is hit, 0 the first.",
        "pattern=fpf hits the first and the third; after and ms are milliseconds of the run, for is how long.",
    ):
        out.print(hanging("", line))
