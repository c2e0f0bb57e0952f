"""Which call on the connector let an exception out, and whether it was the harness that failed."""

from __future__ import annotations

import traceback

from kvcover.real_backend.driver.reports import Raised


def raised_by(name: str, error: BaseException) -> Raised:
    """Say which call on the connector let an exception out: the outermost frame in the connector's module.

    When the clean-up after one call raised again, the first exception is the one to tell.
    """
    first = error
    while first.__context__ is not None and _connector_call(first.__context__) not in ("", _connector_call(first)):
        first = first.__context__
    call = _connector_call(first)
    misfit = where_it_failed(first) if not call and isinstance(first, _MISFITS) else ""
    return Raised(name, call or "outside the connector", type(first).__name__, str(first), misfit)


_MISFITS = (AttributeError, TypeError, ImportError, NameError)
"""What a harness meets that calls things which aren't there any more."""


def where_it_failed(error: BaseException) -> str:
    """Say which line of the harness let an exception out, and the exception."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "real_backend" in frame.filename]
    line = f"`{ours[-1].line}` in {ours[-1].name}" if ours else "a call"
    return f"{line}: {type(error).__name__}: {error}"


def _connector_call(error: BaseException) -> str:
    calls = (frame.name for frame in traceback.extract_tb(error.__traceback__) if "moriio" in frame.filename)
    return next(calls, "")
