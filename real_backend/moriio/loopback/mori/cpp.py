"""The part of `mori.cpp`, the real package's binding, that `mori.io` doesn't show and faults need."""

from mori.io import StatusCode, TransferStatus

__all__ = ["StatusCode", "TransferStatus"]
