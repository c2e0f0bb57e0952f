"""A deliberately naive oracle for what moves between caches that lie differently in memory.

Memory is a dictionary from byte address to what that byte is; a cache is a list of axes as a tensor's shape has them; the
connector's arithmetic is written out layout by layout, and a batch is a loop over bytes. One request, one layer, TP 1 on
both sides. It shares no code with the package and must never import it: its use is to disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Plane, head, token of the prompt, byte of the head, dtype: what one byte of KV is.
Byte = tuple[int, int, int, int, str]
Entry = tuple[int, int, int]
BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


class Refused(Exception):
    """The connector raised."""


@dataclass(frozen=True)
class Side:
    """One rank's cache of one layer. `heads` 0 is MLA."""

    layout: str
    order: str
    num_blocks: int
    block_size: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def es(self) -> int:
        return BYTES[self.dtype]

    @property
    def head(self) -> int:
        return self.head_dim * self.es

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model runner's tensor has it."""
        nb, bs, h, d = self.num_blocks, self.block_size, self.heads, self.head_dim
        inner = (bs, h, d) if self.order == "NHD" else (h, bs, d)
        if self.layout == "split":
            return (2, nb, *inner)
        if self.layout == "interleaved":
            return (nb, 2, *inner)
        if self.layout == "latent":
            return (nb, bs, d)
        return (nb, 1, bs, d) if self.heads == 0 else (nb, h, bs, 2 * d)

    @property
    def nbytes(self) -> int:
        total = self.es
        for length in self.shape:
            total *= length
        return total

    def at(self, plane: int, block: int, token: int, head: int) -> int:
        """Where the first byte of a (plane, block, token, head) lies, by the order of the axes."""
        nb, bs, h = self.num_blocks, self.block_size, max(self.heads, 1)
        if self.heads == 0:
            return (block * bs + token) * self.head
        if self.layout in ("packed", "standard"):
            return (((block * h + head) * bs + token) * 2 + plane) * self.head
        outer = plane * nb + block if self.layout == "split" else block * 2 + plane
        inner = token * h + head if self.order == "NHD" else head * bs + token
        return (outer * h * bs + inner) * self.head


def strides(shape: tuple[int, ...]) -> list[int]:
    """Elements from one index to the next, of a contiguous tensor."""
    found = [1]
    for length in reversed(shape[1:]):
        found.insert(0, found[0] * length)
    return found


def whole_blocks(local: Side, remote: Side, pairs: Sequence[tuple[int, int]]) -> list[Entry]:
    """(local, remote, size) in bytes, from the local tensor's shape and the number of blocks that the peer tells."""
    shape, step = local.shape, strides(local.shape)
    if len(shape) == 5 and shape[0] == 2:
        told = remote.shape[1] if len(remote.shape) == 5 and remote.shape[0] == 2 else remote.shape[0]
        length, stride, v_here, v_there = shape[2] * shape[3] * shape[4], step[1], step[0], step[1] * told
    elif len(shape) == 5:
        length, stride, v_here, v_there = shape[2] * shape[3] * shape[4], step[0], step[1], step[1]
    else:
        length, stride, v_here, v_there = step[0], step[0], -1, -1
    entries = []
    for here, there in pairs:
        entries.append((here * stride * local.es, there * stride * local.es, length * local.es))
        if v_here >= 0:
            entries.append(((v_here + here * stride) * local.es, (v_there + there * stride) * local.es, length * local.es))
    return entries


def told_layout(side: Side) -> tuple[int, ...] | None:
    """What 0.33 tells of a K/V cache: heads, tokens, bytes a content, then strides of blocks, heads, tokens, planes."""
    if side.heads == 0:
        return None
    shape, step = side.shape, [n * side.es for n in strides(side.shape)]
    if len(shape) == 4:
        return shape[1], shape[2], shape[3] * side.es, step[0], step[1], step[2]
    plane, block = (0, 1) if shape[0] == 2 else (1, 0)
    token, head = (2, 3) if shape[2] == side.block_size else (3, 2)
    return shape[head], shape[token], shape[4] * side.es, step[block], step[head], step[token], step[plane]


def head_slices(source: tuple[int, ...], target: tuple[int, ...], pairs: Sequence[tuple[int, int]]) -> Iterator[Entry]:
    """(source, target, size) of all heads between two layouts as they were told."""
    if source[1:3] != target[1:3] or len(source) != len(target) or source[0] != target[0]:
        raise Refused("blocks, heads or planes differ")
    for plane in range(2 if len(source) == 7 else 1):
        for read, written in pairs:
            for token in range(source[1]):
                for head in range(source[0]):
                    start, end = (
                        (side[6] * plane if plane else 0) + block * side[3] + head * side[4] + token * side[5]
                        for side, block in ((source, read), (target, written))
                    )
                    yield start, end, source[2]


def moved(release: str, mode: str, prefill: Side, decode: Side, read: Sequence[int], written: Sequence[int]) -> list[Entry]:
    """(prefill's address, decode's address, size) of a batch. Raises Refused where it can't be planned."""
    minor = int(release.split(".")[1])
    if mode == "write":
        if minor >= 33 and prefill.block_size != decode.block_size:
            raise Refused("tokens a block")
        if len(read) > len(written) or (minor <= 25 and len(read) != len(written)):
            raise Refused("lengths")
    elif len(written) > len(read) + (minor >= 31):
        raise Refused("lengths")
    elif len(written) < len(read):
        if minor <= 25:
            raise Refused("lengths")
        if minor <= 29:
            written = read[-len(written) :]  # vllm#48471
        elif minor >= 31:
            read = read[-len(written) :]
    pairs = list(zip(read, written, strict=False))
    mine, theirs = told_layout(prefill), told_layout(decode)
    if minor >= 33 and mine is not None and theirs is not None and mine != theirs:
        return list(head_slices(mine, theirs, pairs))
    if mode == "write":
        return whole_blocks(prefill, decode, pairs)
    return [(there, here, size) for here, there, size in whole_blocks(decode, prefill, [(w, r) for r, w in pairs])]


def graded(
    entries: Sequence[Entry], prefill: Side, decode: Side, read: Sequence[int], written: Sequence[int]
) -> tuple[int, int, int]:
    """Cells of the request at decode that are covered, wrong and missing after one batch."""
    source: dict[int, Byte] = {}
    planes, heads = (1, 1) if prefill.heads == 0 else (2, prefill.heads)
    for plane in range(planes):
        for position, block in enumerate(read):
            for token in range(prefill.block_size):
                for head in range(heads):
                    start = prefill.at(plane, block, token, head)
                    for byte in range(prefill.head):
                        source[start + byte] = (plane, head, position * prefill.block_size + token, byte, prefill.dtype)
    target: dict[int, Byte] = {}
    if all(start + size <= prefill.nbytes and end + size <= decode.nbytes for start, end, size in entries):
        for start, end, size in entries:
            for byte in range(size):
                if start + byte in source:
                    target[end + byte] = source[start + byte]
    counts = [0, 0, 0]
    for plane in range(planes):
        for position, block in enumerate(written):
            for head in range(heads):
                want, have = [], []
                for token in range(decode.block_size):
                    start = decode.at(plane, block, token, head)
                    for byte in range(decode.head):
                        want.append((plane, head, position * decode.block_size + token, byte, decode.dtype))
                        have.append(target.get(start + byte))
                counts[0 if have == want else 1 if any(have) else 2] += 1
    return counts[0], counts[1], counts[2]


def starts(release: str, side: Side) -> bool:
    """Whether the release's connector takes a tensor of that shape."""
    minor, axes = int(release.split(".")[1]), len(side.shape)
    if side.heads == 0:
        return axes == (4 if minor >= 29 else 3)
    return axes == 5 or minor >= 26
