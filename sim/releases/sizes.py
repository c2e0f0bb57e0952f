"""TP sizes as a connector reads them from a leg, and what a size that the leg does not give counts as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcover.sim.errors import PeerRefusal

Params = Mapping[str, Any]


def tp_size_or_1(params: Params, own: int, truth: int) -> Any:
    return params.get("tp_size", 1)


def remote_tp_size_or_tp_size_or_0(params: Params, own: int, truth: int) -> Any:
    return as_int(params.get("remote_tp_size") or params.get("tp_size") or 0)


def true_size(params: Params, own: int, truth: int) -> Any:
    return truth


def remote_tp_size_or_tp_size_or_own(params: Params, own: int, truth: int) -> int:
    return as_int(params.get("remote_tp_size") or params.get("tp_size") or own)


def own_size(params: Params, own: int, truth: int) -> int:
    return own


def as_int(value: Any) -> int:
    """Python's int(), with its error as the connector's."""
    try:
        return int(value)
    except TypeError as error:
        raise PeerRefusal("TypeError", f"int({value!r}): {error}") from None
    except (ValueError, OverflowError) as error:
        raise PeerRefusal("ValueError", f"int({value!r}): {error}") from None


def keep(size: int, own: int) -> int:
    return size


def zero_is_own(size: int, own: int) -> int:
    return own if size == 0 else size


def non_positive_is_own(size: int, own: int) -> int:
    return own if size <= 0 else size
