"""What wrong cells hold: the tag that was found against the one that was wanted, in words, and how many of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
FEW = 4
"""So many cells are told of one by one."""
KINDS = {
    "request": "of another request",
    "layer": "of another layer",
    "plane": "of K for V or V for K",
    "head": "of another head",
    "block": "of another block",
    "dtype": "of another type",
    "mixed": "of several places",
    "partial": "only in part",
    "misaligned": "misaligned",
    "unknown": "of unknown bytes",
}
"""Kinds of wrong cells: `4 hold what is …`."""
_PLACE = ("request", "layer", "plane", "head", "block")


class WrongCells(msgspec.Struct, frozen=True):
    """The wrong cells of one rank and request when they were looked at: how many of each kind, and the first few in words."""

    rank: str
    request: int
    kinds: dict[str, int]
    first: list[str]


class Place(msgspec.Struct, frozen=True):
    """A cell by its request, layer, plane (0: K, 1: V), global head and the request's block, each counted from 0."""

    request: int
    layer: int
    plane: int
    head: int
    block: int


class Held(msgspec.Struct, frozen=True):
    """What one wrong cell holds: of which kind, and whose content; `places` has one or two of them, or none if unknown."""

    kind: str
    places: tuple[Place, ...] = ()


def held(want: Place, found: Mapping[str, Numbers], empty: NDArray[np.bool_], known: NDArray[np.bool_], block_size: int) -> Held:
    """Say what a wrong cell holds, whose values were decoded.

    All arrays are [block_size, values of a token]: `found` has request, layer, plane, head and token (counted from 0 in its
    request) of each value and `value`, its number within the token; where `empty` nothing was ever written, and where not
    `known` no number of the run is.
    """
    full = known & ~empty
    if not full.any():
        return Held("unknown")
    block = found["token"] // block_size
    owners = np.stack([found[name][full] for name in _PLACE[:-1]] + [block[full]], axis=1)
    _, order = np.unique(owners, axis=0, return_index=True)
    places = tuple(Place(*(int(number) for number in owners[index])) for index in sorted(order.tolist()))
    if empty.any():
        return Held("partial", places[:2])
    if not known.all():
        return Held("unknown", places[:2])
    tokens, values = found["token"], found["value"]
    in_row = bool((tokens == tokens[0, 0] + np.arange(block_size)[:, None]).all() and (values == np.arange(values.shape[1])).all())
    one_owner = len({(each.request, each.layer, each.plane, each.head) for each in places}) == 1
    if not in_row:
        return Held("mixed" if len(places) > 1 else "misaligned", places[:2])
    if len(places) > 1:
        return Held("misaligned" if one_owner else "mixed", places[:2])
    differ = [name for name in _PLACE if getattr(places[0], name) != getattr(want, name)]
    return Held(differ[0] if differ else "dtype", places)


def summary(rank: str, request: int, cells: Sequence[tuple[Place, Held]], planes: int, heads: int) -> WrongCells:
    """The wrong cells of a rank and request; `planes` and global `heads` are those of the model, and are named if several."""
    kinds = Counter(found.kind for _, found in cells)

    def words(want: Place, found: Held) -> str:
        where = f"{rank} layer {want.layer} {_cell(want, planes, heads)}"
        if not found.places:
            return f"{where} holds unknown bytes"
        holds = " and ".join(_other(want, each, planes, heads) for each in found.places)
        said = {"partial": "holds only a part of ", "misaligned": "holds, misaligned, ", "mixed": "holds parts of "}
        also = {"dtype": ", of another type", "unknown": " and unknown bytes"}
        return f"{where} {said.get(found.kind, 'holds ')}{holds}{also.get(found.kind, '')}"

    ordered = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
    first_of_kind = {found.kind: number for number, (_, found) in reversed(list(enumerate(cells)))}.values()
    few = sorted(list(dict.fromkeys([*sorted(first_of_kind), *range(len(cells))]))[:FEW])
    return WrongCells(rank, request, ordered, [words(*cells[number]) for number in few])


def in_words(kinds: Mapping[str, int]) -> str:
    """`4 hold what is of another head, 2 what is of several places`."""
    return ", ".join(f"{count} {KINDS[kind]}" for kind, count in kinds.items())


def _cell(place: Place, planes: int, heads: int) -> str:
    plane = f"{'KV'[place.plane]} " if planes == 2 else ""
    head = f"head {place.head} " if heads > 1 else ""
    return f"{plane}{head}block {place.block}"


def _other(want: Place, found: Place, planes: int, heads: int) -> str:
    """A place, without what it has in common with the wanted one and need not be said."""
    request = f" of request {found.request}" if found.request != want.request else ""
    layer = f" of layer {found.layer}" if found.layer != want.layer else ""
    plane = f"{'KV'[found.plane]} " if planes == 2 and found.plane != want.plane else ""
    head = f"head {found.head} of " if heads > 1 else ""
    return f"{plane}{head}block {found.block}{layer}{request}"
