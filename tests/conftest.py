"""What tests of several files need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trees() -> Path:
    """The folder with one vLLM source tree a release; without it, or without torch, the test says that it was not run."""
    pytest.importorskip("torch", reason="NOT RUN: needs the connector extra")
    folder = os.environ.get("KVCOVER_TREES")
    if not folder:
        pytest.skip("NOT RUN: set KVCOVER_TREES to a folder with vLLM source trees, one a release")
    return Path(folder)
