"""What a run happened on, as far as it can be told without a driver: for evidence that others can judge."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from kvcover import __version__

_AMD = "0x1002"


def environment() -> dict[str, Any]:
    """Versions and devices of this machine; None where there is none. No names, addresses or paths of it."""
    return {
        "kvcover": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "torch": _version("torch"),
        "amd-mori": _version("amd-mori"),
        "rocm": _first_line(Path("/opt/rocm/.info/version")),
        "gpus": _gpus(),
        "nics": _nics(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().split("\n", 1)[0].strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _gpus() -> list[str] | None:
    """PCI ids of AMD GPUs."""
    cards = sorted(Path("/sys/class/drm").glob("renderD*/device"))
    found = [f"{_AMD}:{_first_line(card / 'device')}" for card in cards if _first_line(card / "vendor") == _AMD]
    return found or None


def _nics() -> list[str] | None:
    """RDMA devices, with firmware."""
    devices = sorted(Path("/sys/class/infiniband").glob("*"))
    return [f"{device.name} {_first_line(device / 'fw_ver') or ''}".strip() for device in devices] or None
