"""Faults are data plus a pure rewrite at a named point; nothing here knows a tier.

>>> fault = parse_fault("drop:remote_tp_size@prefill")
>>> fault.rewrite({"remote_tp_size": 8, "transfer_id": "a"})
({'transfer_id': 'a'}, True)
"""

import difflib

from kvcover.faults.events import EVENT_KINDS, EventFault, parse_event_fault
from kvcover.faults.injector import Fault, Injector
from kvcover.faults.kinds import FaultKind, FaultSyntaxError
from kvcover.faults.params import KEY_KINDS, KeyFault, parse_key_fault

KINDS: dict[str, FaultKind] = {**KEY_KINDS, **EVENT_KINDS}


def parse_fault(text: str) -> Fault:
    """Read any fault shorthand; raises FaultSyntaxError with the nearest right form."""
    kind, colon, _ = text.partition(":")
    if colon and kind in KEY_KINDS:
        return parse_key_fault(text)
    if colon and kind in EVENT_KINDS:
        return parse_event_fault(text)
    if kind in KINDS:
        raise FaultSyntaxError(f"{text!r} aims at nothing; use {KINDS[kind].syntax}")
    close = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.5)
    right = f"did you mean {close[0]!r}? use {KINDS[close[0]].syntax}" if close else f"choose from {', '.join(KINDS)}"
    raise FaultSyntaxError(f"no fault kind {kind!r} in {text!r}; {right}")


__all__ = [
    "KINDS",
    "EventFault",
    "Fault",
    "FaultKind",
    "FaultSyntaxError",
    "Injector",
    "KeyFault",
    "parse_fault",
]
