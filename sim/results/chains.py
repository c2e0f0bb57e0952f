"""Chains of causes: what a finding blames, and which lever would show whether it is right.

A cause is written by hand, beside the event that it explains. Its levers are what can be flipped to put it to the test: a
policy of the release, a key of a leg, a planned fault. `kvcover.sim.search.causes` flips them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.results.result import Finding


class Lever(NamedTuple):
    """A policy by its field, a key by its name and `leg`, or a planned fault by its text."""

    kind: Literal["policy", "key", "fault"]
    name: str
    leg: str = ""


class Cause(msgspec.Struct, frozen=True):
    """One cause in words. Without levers it is a fact of the scenario, which no flip can show."""

    text: str
    levers: tuple[Lever, ...] = ()

    def told(self, by_model: bool) -> str:
        """Its words; `by_model`: a policy is the model's word, not something that was seen."""
        asserted = by_model and any(lever.kind == "policy" for lever in self.levers)
        return f"as modelled: {self.text}" if asserted else self.text


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A finding whose causes can still be put to the test, nearest cause first."""

    kind: str
    text: str
    causes: list[Cause]

    def told(self, by_model: bool = False) -> Finding:
        """As results have it. On a real tier what a release's policy says is only what the model knows of it."""
        causes = [cause.told(by_model) for cause in self.causes]
        return Finding(kind=self.kind, text=self.text, causes=causes)


def policy_cause(release: ConnectorRelease, field: str) -> Cause:
    """What the release does at this field."""
    name = getattr(release, field)
    return Cause(f"release {release.name}, {field} = {name}: {FIELDS[field].policies[name].text}", (Lever("policy", field),))


def fault_cause(fault: str) -> Cause:
    """A planned fault, as it was written."""
    return Cause(fault, (Lever("fault", fault),))


def key_cause(key: str, sent: Any, leg: str, truth: str) -> Cause:
    """A key of a leg that says something else than what is."""
    return Cause(f"`{key}` = {sent!r} was sent to {leg}, and {truth}", (Lever("key", key, leg),))


def span(names: Iterable[str]) -> str:
    """`P1–P7` for a run of neighbours, else the names."""
    listed = sorted(names, key=lambda name: (len(name), name))
    heads = [name.rstrip("0123456789") for name in listed]
    tails = [int(name[len(head) :] or -1) for name, head in zip(listed, heads, strict=True)]
    if len(listed) > 2 and len(set(heads)) == 1 and tails == list(range(tails[0], tails[0] + len(tails))):
        return f"{listed[0]}–{listed[-1]}"
    return ", ".join(listed)
