"""The report as one HTML page that needs no network: `page.html` filled in, with `page.css` and `page.js` inside of it.

What comes of a file is text and never markup: the template escapes all of it, and the page allows no style, script or address
but its own two by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from kvcover.sim.plain import harmless
from kvcover.sim.report.content import content, own, shade, template
from kvcover.sim.report.gather import Material, Run

_SHADES = [("c0", "0"), *((f"c{tenth}", f"0.{tenth}") for tenth in range(1, 10)), ("full", "1")]


def page(material: Material, baseline: Sequence[Run] = ()) -> str:
    """The page. `baseline` are runs to compare with; none: there is no such section."""
    shades: dict[str, Any] = {"heat": lambda run: shade(run.result.coverage), "shade": shade, "sha256": _sha256}
    style, script = Markup(own("page.css")), Markup(own("page.js"))
    filled = template("page.html", _harmless, shades)
    return filled.render(content(material, baseline), shades=_SHADES, style=style, script=script)


def _harmless(value: Any) -> Any:
    """Text without what would turn its direction or can't be seen; of the page's own markup nothing is touched."""
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
