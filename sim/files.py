"""Files of a user: read whole within bounds, as nobody knows what stands behind a name; what can't be read is one clear line."""

from __future__ import annotations

import sys
from pathlib import Path

from kvcover.sim.errors import InputError

MB = 1 << 20


def read_text(path: str | Path, most: int, hint: str) -> str:
    """The text of a file, or of standard input for `-`, without a byte order mark.

    Raises InputError for one that can't be read, holds more than `most` bytes, or is not UTF-8; `hint` says what to give.
    """
    place = str(path) or "''"
    try:
        if place == "-":
            content = sys.stdin.buffer.read(most + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(most + 1)
    except OSError as error:
        raise InputError(place, f"can't be read: {error.strerror or error}", hint) from None
    except (ValueError, AttributeError) as error:  # a name with a null byte; a standard input that is closed
        raise InputError(place, f"can't be read: {error}", hint) from None
    if len(content) > most:
        raise InputError(place, f"holds more than {most / MB:g} MB", hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(place, "is not UTF-8 text", hint) from None
