"""Text of files as a terminal may be given it."""

from __future__ import annotations

import re

_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""What moves a cursor, changes colours or titles, or turns the direction of text: all but tab and newline."""


def harmless(text: str) -> str:
    """The text, with what would steer a terminal as `\\u001b`, which in JSON means the same.

    >>> print(harmless("red \x1b[31m"))
    red \\u001b[31m
    """
    return _STEERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
