"""vLLM trees without vLLM: one file a connector, that holds the name of the release whose connector it stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.real_backend.machine.hashes import KNOWN

FILE = "moriio_connector.py"


def hash_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every release's connector be such a file."""
    for release in list(KNOWN):
        monkeypatch.setitem(KNOWN, release, {FILE: hashlib.sha256(release.encode()).hexdigest()})


def made_up_tree(folder: Path, connector: str, version: str = "") -> Path:
    """A tree that calls itself `version`, with the connector of another release perhaps, or of none."""
    (folder / MORIIO_FOLDER).mkdir(parents=True)
    (folder / MORIIO_FOLDER / FILE).write_text(connector)
    if version:
        (folder / f"vllm-{version}.dist-info").mkdir()
    return folder
