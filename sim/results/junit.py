"""Verdicts as JUnit XML, which every CI shows: one test case a cell.

What is inconclusive is an `<error>`, as no dashboard may show it green; what a tier can't run is `<skipped>`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from kvcover.sim.results.gate import Cell

_TAGS = {"fail": "failure", "inconclusive": "error", "skipped": "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what no XML document may hold


def junit(suite: str, cells: Sequence[Cell]) -> str:
    """The XML document of one suite, named after the command: `kvcover matrix`."""
    count = {tag: str(sum(cell.verdict == verdict for cell in cells)) for verdict, tag in _TAGS.items()}
    totals = {"tests": str(len(cells)), "failures": count["failure"], "errors": count["error"], "skipped": count["skipped"],
              "time": f"{sum(cell.seconds for cell in cells):.3f}"}  # fmt: skip
    root = ET.Element("testsuites", {"name": "kvcover", **totals})
    inner = ET.SubElement(root, "testsuite", {"name": _plain(suite), **totals})
    for cell in cells:
        _add(inner, suite, cell)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add(suite: ET.Element, group: str, cell: Cell) -> None:
    case = ET.SubElement(
        suite, "testcase", {"classname": _plain(group.replace(" ", ".")), "name": _plain(cell.name), "time": f"{cell.seconds:.3f}"}
    )
    if cell.verdict in _TAGS:
        inner = ET.SubElement(case, _TAGS[cell.verdict], {"message": _plain(cell.reason)})
        if cell.verdict == "inconclusive":
            inner.set("type", "inconclusive")
        inner.text = _plain("\n".join(part for part in (*(cell.details or (cell.reason,)), cell.replay) if part))
    notes = ["as bad as in the baseline"] if cell.as_before else []
    notes += [f"better than the baseline: {text}" for text in cell.better]
    if notes:
        ET.SubElement(case, "system-out").text = _plain("\n".join([*notes, cell.replay]))


def _plain(text: str) -> str:
    return _NOT_XML.sub("?", text)
