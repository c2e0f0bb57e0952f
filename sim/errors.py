"""Every exception that kvcover raises on purpose, as one tree.

`InputError` is the user's: the command prints its one line and exits with 2. `PeerRefusal` and its
children are the *connector's*: they are raised by policies inside a run and become events, never tracebacks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class KvcoverError(Exception):
    """Base of all errors of this project."""


class InputError(KvcoverError):
    """Bad input: `place` (a field path, an option or a file), what is wrong there, and the nearest right value."""

    def __init__(self, place: str, problem: str, hint: str = "") -> None:
        super().__init__(place, problem, hint)
        self.place = place
        self.problem = problem
        self.hint = hint

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        return 2

    def __str__(self) -> str:
        line = f"{self.place}: {self.problem}"
        return f"{line}; {self.hint}" if self.hint else line


class TierError(InputError):
    """The tier that was asked for can't run here. It never falls back to another."""


class NotBegun(TierError):
    """A run that did not begin in the time that it was given: neither a pass nor a failure of anything."""


class MachineError(TierError):
    """The machine spoilt a run: a process was stopped, killed or starved, a port taken, a file or memory missing.

    Found when the run had begun, so that it says nothing of the connector: inconclusive.
    """

    @property
    def exit_code(self) -> int:
        return 3


class TooBusy(MachineError):
    """The machine gave a run too little time. With more of it, or with longer timers, the same run may go well."""


class Inconclusive(KvcoverError):
    """What was run can't vouch for what it shows: neither good nor bad. The command says why."""

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        return 3


class PeerRefusal(KvcoverError):
    """A connector function raised: `error` is the exception class that the real code raises there.

    `policy` names the release's field that decides about it, where that is known at this place.
    """

    def __init__(self, error: str, text: str, policy: str = "") -> None:
        super().__init__(error, text, policy)
        self.error = error
        self.text = text
        self.policy = policy

    def due_to(self, policy: str) -> PeerRefusal:
        """The same refusal, with the policy that decides about it unless it knows its own."""
        return PeerRefusal(self.error, self.text, self.policy or policy)

    def __str__(self) -> str:
        return f"{self.error}: {self.text}"


def nearest(value: str, choices: Iterable[str]) -> str:
    """Hint that names the closest of `choices`, whatever its case, or lists them when nothing is close."""
    names = sorted(choices)
    close = _nearest_version(value, names) or difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "choose from " + ", ".join(names)


_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")


def _nearest_version(value: str, names: list[str]) -> list[str]:
    """The version of the same major number that is nearest by minor and patch number: 0.26.0 for 0.26.1, not 0.27.1."""
    wanted = _VERSION.fullmatch(value)
    if wanted is None:
        return []
    major, minor, patch = (int(part or 0) for part in wanted.groups())
    known = {name: [int(part or 0) for part in match.groups()] for name in names if (match := _VERSION.fullmatch(name))}
    same = [name for name, version in known.items() if version[0] == major]
    return sorted(same, key=lambda name: (abs(known[name][1] - minor), abs(known[name][2] - patch)))[:1]


def plain(text: str) -> str:
    """Text of a file as it may be shown: a file must not steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def short(value: object) -> str:
    """A value as a message shows it: quoted, with what can't be seen escaped, and not too long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; more digits than Python likes to write
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
