"""The report as Markdown for a pull request: `report.md` filled in. What comes of a file is text there, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from kvcover.sim.plain import harmless
from kvcover.sim.report.content import content, template
from kvcover.sim.report.gather import Material, Run

_MOST = 20
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~&#@]")


def markdown(material: Material, baseline: Sequence[Run] = ()) -> str:
    """The Markdown; `baseline` as in `page`."""
    shown = content(material, baseline)
    mapped = [run for heats in shown["maps"].values() for heat in heats for run in heat.runs.values()]
    bad = [run for run in mapped if run.verdict.status == "fail"]
    text = template("report.md", _plain, {"code": _code}).render(shown, most=_MOST, bad=bad)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _plain(value: Any) -> Any:
    """Text in one line that means what it says: no markup, no mention of anybody."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return Markup(_SPECIAL.sub(_escaped, re.sub(r"\s+", " ", harmless(value))))


def _escaped(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};" if found[0] in "@&<>#" else "\\" + found[0]


def _code(text: str) -> Markup:
    """Text as a span of code, which a table may hold."""
    line = " ".join(harmless(text).split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return Markup(f"{fence}{pad}{line}{pad}{fence}")
