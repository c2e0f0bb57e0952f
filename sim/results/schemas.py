"""JSON Schemas of scenarios and results, made of the types that read and write them, so that they can't say anything else."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcover.sim.errors import InputError, nearest
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario

KINDS: dict[str, type[msgspec.Struct]] = {"scenario": Scenario, "result": Result}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a `scenario` or a `result`; `unit` says what a number counts, and is no keyword of JSON Schema's.

    Raises InputError for another kind.
    """
    if kind not in KINDS:
        raise InputError("schema", f"there is none of {kind!r}", nearest(kind, KINDS))
    # A result's scenario is a free table to msgspec, as a file may be of a newer kvcover; here it is what this one writes.
    _, found = msgspec.json.schema_components(KINDS.values(), ref_template="#/$defs/{name}")
    found["Result"]["properties"]["scenario"] = {"anyOf": [{"$ref": "#/$defs/Scenario"}, {"type": "null"}], "default": None}
    name = KINDS[kind].__name__
    return {"$schema": _DRAFT, "$ref": f"#/$defs/{name}", "$defs": _reached(found, name)}


def _reached(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The definitions that one refers to, itself first."""
    names = [name]
    for each in names:  # grows
        text = msgspec.json.encode(found[each]).decode()
        names += [other for other in found if f'"#/$defs/{other}"' in text and other not in names]
    return {each: found[each] for each in names}
