"""The report's maps of TP pairings as a picture, for those who have matplotlib (extra `report`)."""

from __future__ import annotations

import io
from typing import Any

from kvcover.sim.errors import InputError
from kvcover.sim.plain import harmless
from kvcover.sim.report.content import MARKS, shade
from kvcover.sim.report.gather import Material
from kvcover.sim.report.views import Heat, heats_of
from kvcover.sim.results.show import fraction

_MOST_MAPS = 24
_COLUMNS = 4
_COLOURS = {
    "c0": ("#7f1d1d", "white"), "c1": ("#9f2a20", "white"), "c2": ("#b93d24", "white"), "c3": ("#c2501f", "white"),
    "c4": ("#f09a5b", "#2a1200"), "c5": ("#f4ad76", "#2a1200"), "c6": ("#f7be90", "#2a1200"), "c7": ("#facdaa", "#2a1200"),
    "c8": ("#fbdcc3", "#2a1200"), "c9": ("#fdeadb", "#2a1200"), "full": ("#dcefe3", "#0b3d1f"),
}  # fmt: skip
"""Those of page.css in the light: paper and ink."""


def picture(material: Material, place: str) -> bytes:
    """A PNG with a map a release and mode. Raises InputError if there is no map, too many, or no matplotlib."""
    maps = [heat for heat in heats_of(material.runs) if len(heat.runs) > 1]
    if not maps:
        raise InputError(
            place, "no matrix, and nothing else makes a picture", "give what `kvcover matrix -o` wrote, or -o report.html"
        )
    if len(maps) > _MOST_MAPS:
        raise InputError(
            place, f"{len(maps)} maps, and a picture shows {_MOST_MAPS} at most", "give fewer files, or -o report.html"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("-o", "a picture needs matplotlib", "pip install 'kvcover[report]', or name a .html or .md file") from None
    across = min(_COLUMNS, len(maps))
    down = -(-len(maps) // across)
    sizes = max(len(heat.columns) for heat in maps), max(len(heat.rows) for heat in maps)
    figure = Figure(figsize=(across * (1.1 * sizes[0] + 0.9), down * (0.7 * sizes[1] + 1.3)), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for index in range(down * across):
        axis = axes[index // across][index % across]
        if index < len(maps):
            _draw(axis, maps[index])
        else:
            axis.set_axis_off()
    figure.suptitle("Coverage of decode's KV cache at go, and outcome", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _draw(axis: Any, heat: Heat) -> None:
    """One map: colour and number say coverage, the word and its mark what came of the run."""
    from matplotlib.patches import Rectangle

    rows, columns = heat.rows, heat.columns
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    for (prefill, decode), run in heat.runs.items():
        x, y, result = columns.index(decode), rows.index(prefill), run.result
        paper, ink = _COLOURS[shade(result.coverage)]
        bad = run.verdict.status == "fail"
        edge = "#b3261e" if bad else "white"
        axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=paper, edgecolor=edge, linewidth=1.5))
        text = f"{fraction(result.coverage)}\n{MARKS[run.verdict.status]} {result.outcome}"
        axis.text(x, y, text, ha="center", va="center", fontsize=8, color=ink, weight="bold" if bad else "normal")
    axis.set_xticks(range(len(columns)), [f"TP{size}" for size in columns])
    axis.set_yticks(range(len(rows)), [f"TP{size}" for size in rows])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_xlabel("decode")
    axis.set_ylabel("prefill")
    setting = heat.setting
    told = [f"vLLM {setting.ran}, {setting.mode.upper()}", ", ".join([setting.model, *setting.faults])[:60]]
    axis.set_title("\n".join(harmless(line).replace("$", "\\$") for line in told), fontsize=9)
