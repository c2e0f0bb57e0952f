"""A vLLM tree of links into a release's own, in which one file may be another."""

from __future__ import annotations

from pathlib import Path

from kvcover.real_backend.machine.trees import find


def linked_tree(folder: Path, release: str, file: str) -> Path:
    """Link a release's tree into `folder`, with a copy of its own of `file`, which is a path inside the tree."""
    source = find(release).path
    assert source is not None
    *parents, name = Path(file).parts
    for depth in range(len(parents) + 1):
        mine, theirs = folder.joinpath(*parents[:depth]), source.joinpath(*parents[:depth])
        mine.mkdir(parents=True, exist_ok=True)
        for entry in theirs.iterdir():
            if entry.name not in ("__pycache__", [*parents, name][depth]):
                (mine / entry.name).symlink_to(entry)
    (folder / file).write_text((source / file).read_text())
    return folder
