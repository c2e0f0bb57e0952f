"""Which connector a vLLM tree has: what the hashes of its files say, whatever the tree calls itself.

ROCm images carry development versions, and folders can be renamed; the files of a release's connector are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.sim.releases.records import ALIASES, PUBLISHED


@dataclass(frozen=True, slots=True)
class Identity:
    """The release whose connector it is, but for `differ` of its files; None if it has no file of any release's."""

    release: str | None
    differ: int = 0

    @property
    def exact(self) -> bool:
        """Whether it is that release's connector, byte for byte."""
        return self.release is not None and not self.differ

    @property
    def text(self) -> str:
        """What it is, in words."""
        if self.release is None:
            return "no known release"
        files = "1 file differs" if self.differ == 1 else f"{self.differ} files differ"
        return self.release if self.exact else f"derived from {self.release}, {files}"

    def is_release(self, name: str) -> bool:
        """Whether it is the release of that name, or of its other name, byte for byte."""
        return self.exact and self.release == ALIASES.get(name, name)


def identify(files: Mapping[str, str], said: str | None) -> Identity:
    """What connector files are, given the SHA-256 of each by name, in a tree that calls itself `said`.

    The release from which the fewest files differ; of several the one that the tree calls itself, else the newest.
    """
    differ = {name: _differing(known, files) for name, known in KNOWN.items() if _shared(known, files)}
    called = number_of(said)
    if not differ:
        return Identity(called if called and files else None, _differing(KNOWN[called], files) if called else 0)
    fewest = min(differ.values())
    nearest = [name for name in PUBLISHED if differ.get(name) == fewest]
    return Identity(called if called in nearest else nearest[-1], fewest)


def number_of(said: str | None) -> str | None:
    """The release whose number a version begins with, `0.27.0` of `0.27.1.dev3+rocm700`; None if there is no such release."""
    found = re.match(r"\d+\.\d+\.\d+", said or "")
    name = ALIASES.get(found[0], found[0]) if found else ""
    return name if name in KNOWN else None


def _differing(known: Mapping[str, str], files: Mapping[str, str]) -> int:
    return sum(known.get(name) != files.get(name) for name in {*known, *files})


def _shared(known: Mapping[str, str], files: Mapping[str, str]) -> bool:
    """Whether they have a file in common that says anything: all releases have the same empty `__init__.py`."""
    return any(files.get(name) == digest for name, digest in known.items() if name != "__init__.py")
