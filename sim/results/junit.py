"""Verdicts as JUnit XML, which every CI shows: one test case a cell.

What is inconclusive is an `<error>`, as no dashboard may show it green; what the tier can't run, and what was never put to the
test beside others that were, is `<skipped>`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from kvcover.sim.results.gate import Cell, first_of
from kvcover.sim.results.verdict import Verdict

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what no XML document may hold


def junit(suite: str, cells: Sequence[Cell], whole: Verdict) -> str:
    """The XML document of one suite, named after the command: `kvcover matrix`.

    Where all cells together show nothing, though none of them does so by itself, that is a case of its own.
    """
    tags = [_tag(cell) for cell in cells]
    if whole.status == "inconclusive" and not {"failure", "error"} & set(tags):
        cells, tags = [*cells, Cell(name="all together", verdict=whole)], [*tags, "error"]
    totals = {"tests": str(len(cells)), "failures": str(tags.count("failure")), "errors": str(tags.count("error")),
              "skipped": str(tags.count("skipped")), "time": f"{sum(cell.seconds for cell in cells):.3f}"}  # fmt: skip
    root = ET.Element("testsuites", {"name": "kvcover", **totals})
    inner = ET.SubElement(root, "testsuite", {"name": _plain(suite), **totals})
    for cell, tag in zip(cells, tags, strict=True):
        _add(inner, suite, cell, tag)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _tag(cell: Cell) -> str:
    if cell.skipped or cell.verdict.idle:
        return "skipped"
    return {"pass": "", "fail": "failure", "inconclusive": "error"}[cell.verdict.status]


def _add(suite: ET.Element, group: str, cell: Cell, tag: str) -> None:
    name = {"classname": _plain(group.replace(" ", ".")), "name": _plain(cell.name)}
    case = ET.SubElement(suite, "testcase", {**name, "time": f"{cell.seconds:.3f}"})
    if tag:
        inner = ET.SubElement(case, tag, {"message": _plain(first_of(cell.verdict.reasons))})
        if tag == "error":
            inner.set("type", "inconclusive")
        inner.text = _plain("\n".join(part for part in (*cell.verdict.reasons, cell.replay) if part))
    notes = ["as bad as in the baseline"] if cell.as_before else []
    notes += [f"as bad, but otherwise: {text}" for text in cell.otherwise]
    notes += [f"better than the baseline: {text}" for text in cell.better]
    if notes:
        ET.SubElement(case, "system-out").text = _plain("\n".join([*notes, cell.replay]))


def _plain(text: str) -> str:
    return _NOT_XML.sub("?", text)
