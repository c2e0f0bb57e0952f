"""Scenarios drawn from seeds: a seed switches on a random subset of FEATURES, and each draws options of its own.

What comes out is plain scenario data. What is left out matters as much as what is in.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvcover.sim.cache.presets import resolve_model
from kvcover.sim.errors import InputError, nearest
from kvcover.sim.kernel.clock import stream
from kvcover.sim.releases.records import NEWEST, get_release
from kvcover.sim.scenario.fabric import get_fabric
from kvcover.sim.scenario.routers import get_router
from kvcover.sim.scenario.scenario import build
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.features import FAULTY, FEATURES
from kvcover.sim.search.grid import sizes_of
from kvcover.sim.search.shrink import Draft


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """What seeds may draw: names of features, and fields that are as given whatever is drawn."""

    features: tuple[str, ...]
    pins: dict[str, Any] = {}

    def drawn(self, seed: int) -> list[str]:
        """The features that a seed switches on. Each has a lot of its own, so a new feature moves no other."""
        key = stream(seed, "swarm").bytes(16)
        lots = (hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in self.features)
        return [
            name
            for name, lot in zip(self.features, lots, strict=True)
            if int.from_bytes(lot, "little") < FEATURES[name].chance * 2**64
        ]

    def draft(self, seed: int, fit: Callable[[Draft], None] = lambda draft: None) -> Draft:
        """The scenario of a seed: the same whichever seeds are explored beside it. `fit` rounds what each feature drew.

        What would make no sense beside the pins is not drawn, such as a layout that the pinned model has not.
        """
        draft = self._draw(seed, fit)
        return draft if not self.pins or _sensible(draft) else self._draw(seed, fit, _sensible)

    def _draw(self, seed: int, fit: Callable[[Draft], None], sensible: Callable[[Draft], bool] | None = None) -> Draft:
        draft: Draft = {"release": NEWEST, "prompt_tokens": 32, "seed": seed}
        pin(draft, self.pins)
        for name in self.drawn(seed):
            before = copy.deepcopy(draft) if sensible else draft
            FEATURES[name].draw(stream(seed, f"swarm/{name}"), draft)
            fit(draft)
            pin(draft, self.pins)
            if sensible and not sensible(_with_model(draft)):
                draft = before
        return _with_model(draft, fit)


def _with_model(draft: Draft, fit: Callable[[Draft], None] = lambda draft: None) -> Draft:
    """The draft; if it has no model yet, with one that its TP sizes divide."""
    if "model" not in draft:
        draft = {**draft, "model": f"layers=1,kv_heads={math.lcm(*sizes_of(draft, 'tp'))},head_dim=8"}
        fit(draft)
    return draft


def _sensible(draft: Draft) -> bool:
    try:
        resolve(build(draft))
    except InputError:
        return False
    return True


def swarm_of(pins: Mapping[str, Any], names: Iterable[str] | None, full: bool, faults: bool, beside: bool = False) -> Swarm:
    """A swarm with these fields pinned, `beside` a baseline or not.

    Raises InputError for pins that make no sense, and for features that aren't there.
    """
    check_pins(pins)
    features = features_of(names, full, faults)
    if "release" in pins and not names:
        features = tuple(name for name in features if name != "skew")  # a pinned release is that of both engines
    if beside:  # what is put beside a baseline is one release, as it is
        features = tuple(name for name in features if name not in ("release", "skew", "overrides"))
    return Swarm(features=features, pins=dict(pins))


def check_pins(pins: Mapping[str, Any]) -> None:
    """Raise InputError for fields and names of no scenario, at once and not at every seed."""
    built = build(pins)
    for place, release in (
        ("release", built.release),
        ("decode_release", built.release if built.decode_release is None else built.decode_release),
    ):
        get_release(release, place).overridden(built.overrides)
    get_router(built.router, built.release)
    get_fabric(built.fabric)
    resolve_model(built.model)


def features_of(names: Iterable[str] | None, full: bool, faults: bool) -> tuple[str, ...]:
    """Names of features in the order of the table; raises InputError for one that isn't there."""
    wanted = list(names or ())
    for name in wanted:
        if name not in FEATURES:
            raise InputError("--features", f"no feature {name!r}", nearest(name, FEATURES))
    chosen = wanted or [name for name, feature in FEATURES.items() if full or not feature.full]
    if not faults and all(name in FAULTY for name in chosen):
        raise InputError("--features", f"{', '.join(chosen)}: nothing else is drawn, and --no-faults draws none of it", "name more")
    return tuple(name for name in FEATURES if name in chosen and (faults or name not in FAULTY))


def pin(draft: Draft, pins: Mapping[str, Any]) -> None:
    """Write the pinned fields over what is there, table by table."""
    for name, value in pins.items():
        if isinstance(value, Mapping):
            pin(draft.setdefault(name, {}), value)
        else:
            draft[name] = value
