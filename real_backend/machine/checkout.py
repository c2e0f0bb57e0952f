"""The state of a git checkout, so that somebody else can have the same: its commit, and a hash of what differs from it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from kvcover.sim import launch

_LIMIT_S = 30.0
# Nothing that the checkout configures is run, and nothing in it is written.
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.pager=cat")


def checkout(tree: Path) -> dict[str, Any] | None:
    """Commit, hash of the difference to it and number of files not in it; None for a folder that is no git checkout."""
    top = _git(tree, "rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top).strip()).resolve() != tree.resolve():
        return None  # none, or one that a tree happens to lie in
    commit, diff = _git(tree, "rev-parse", "HEAD"), _git(tree, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
    untracked = _git(tree, "ls-files", "--others", "--exclude-standard")
    return {
        "commit": None if commit is None else os.fsdecode(commit).strip(),
        "diff_sha256": None if diff is None else hashlib.sha256(diff).hexdigest() if diff else "",
        "untracked_files": None if untracked is None else len(untracked.splitlines()),
    }


def _git(tree: Path, *words: str) -> bytes | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"GIT_OPTIONAL_LOCKS": "0"}
    with launch.Launched(["git", *_SAFE, "-C", str(tree), *words], env=environment, stdout=subprocess.PIPE) as git:
        try:
            found, _ = git.process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
    return None if git.process.returncode else found
