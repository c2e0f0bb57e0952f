"""Faults are data plus a pure rewrite at a named point; nothing here knows a tier.

from faults import parse_fault
fault = parse_fault("drop:remote_tp_size@prefill")
params, fired = fault.rewrite({"remote_tp_size": 8})
"""

from faults.params import KINDS, FaultKind, FaultSyntaxError, KeyFault, apply_faults, parse_fault

__all__ = ["KINDS", "FaultKind", "FaultSyntaxError", "KeyFault", "apply_faults", "parse_fault"]
