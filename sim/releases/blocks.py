"""Which of our blocks goes with which of the peer's, and which caches a connector takes."""

from __future__ import annotations

from kvcover.sim.errors import PeerRefusal


def layouts_split_interleaved(layout: str, mla: bool) -> bool:
    return layout in ("latent", "split", "interleaved")


def layouts_and_packed(layout: str, mla: bool) -> bool:
    return layouts_split_interleaved(layout, mla) or not mla


def layouts_standard(layout: str, mla: bool) -> bool:
    return layout != "latent"


def layouts_any(layout: str, mla: bool) -> bool:
    return True


def pair_equal(local: list[int], remote: list[int]) -> list[tuple[int, int]]:
    if len(local) != len(remote):
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and {len(remote)} remote blocks")
    return list(zip(local, remote, strict=True))


def pair_head(local: list[int], remote: list[int]) -> list[tuple[int, int]]:
    """First with first; the rest of a longer remote list stays unwritten (0.26+)."""
    if len(local) > len(remote):
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and only {len(remote)} remote blocks")
    return list(zip(local, remote, strict=False))


def read_pair_exact(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    return pair_equal(local, remote)


def read_pair_remote_tail_as_local(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is *replaced* by the tail of the remote one: foreign blocks are overwritten (vllm#48471)."""
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    if len(local) < len(remote):
        local = remote[-len(local) :]
    return list(zip(local, remote, strict=False))


def read_pair_head(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is paired with the head of the remote one: shifted by the prefix (0.30)."""
    if len(local) > len(remote):
        raise PeerRefusal("AssertionError", "more local than remote blocks")
    return list(zip(local, remote, strict=False))


def read_pair_suffix(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """A shorter local list is the suffix that the prefix cache lacks; one lookahead block too many is cut (0.31+)."""
    if len(local) > len(remote) + 1:
        raise PeerRefusal("ValueError", f"{len(local)} local blocks and only {len(remote)} remote blocks")
    local = local[: len(remote)]
    return list(zip(local, remote[len(remote) - len(local) :], strict=True))


def read_pair_by_position(local: list[int], remote: list[int], skipped: int) -> list[tuple[int, int]]:
    """Block i of the prompt with block i of the prompt; `skipped` blocks at its start are not asked for."""
    return list(zip(local, remote[skipped:], strict=False))


def last_of_both(local: list[int], remote: list[int], kept: int, prompt: int) -> tuple[list[int], list[int]]:
    """Each engine counts the kept blocks from the end of its own table: lookahead blocks shift them (0.30+)."""
    return local[-kept:], remote


def last_of_prompt(local: list[int], remote: list[int], kept: int, prompt: int) -> tuple[list[int], list[int]]:
    """Both count from the end of the prompt, of which decode's table has `prompt` blocks."""
    count = min(kept, len(remote), prompt)
    return local[prompt - count : prompt], remote[len(remote) - count :]
