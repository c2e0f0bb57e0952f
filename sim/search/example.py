"""A failure that exploration found, as a scenario file that can be replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.failures import FailureGroup
from kvcover.sim.search.shrink import Draft
from kvcover.sim.simulate import run_world


def example_text(group: FailureGroup) -> str:
    """A failure as a scenario file: what to expect in the file, what it was and its digest in comments before it."""
    head = [f"# {group.name}: {group.signature.outcome}, {', '.join(group.signature.kinds)}; {group.count} runs alike"]
    draft = dict(group.draft)
    if group.signature.outcome != "error":
        result = run_world(resolve(msgspec.convert(draft, Scenario)))[0]
        head.append(f"# digest {result.digest}")
        draft["expect"] = {"outcome": result.outcome, "coverage": result.coverage}
    return file_text(head, draft)


def file_text(head: Sequence[str], draft: Draft) -> str:
    """A scenario file: comments, then the draft's fields."""
    return "\n".join([*head, *(f"{name} = {_toml(value)}" for name, value in draft.items())]) + "\n"


def _toml(value: Any) -> str:
    """A value in TOML, where strings are as in JSON and tables stand in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def stored_digest(text: str) -> str | None:
    """The digest in a scenario file's comments."""
    for line in text.splitlines():
        if line.startswith("# digest "):
            return line.removeprefix("# digest ").strip()
    return None
