"""One request on its way: what both engines know of it, and what became of it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from kvcover.sim.cache.ledger import Codes, Count
from kvcover.sim.cache.memory import Memory, Needs, needs_of
from kvcover.sim.scenario.endpoint import Endpoint, Request
from kvcover.sim.scenario.setup import Setup


class BlockPool:
    """Block ids of one DP rank, handed out in order and given back to the end, as vLLM's free queue does."""

    def __init__(self, num_blocks: int, reserved: set[int]) -> None:
        self._free = [block for block in range(1, num_blocks) if block not in reserved]
        self._fixed = reserved
        self.held: dict[int, Codes] = {}

    def fits(self, count: int, fixed: tuple[int, ...] | None) -> bool:
        """Whether there are blocks for a request now."""
        if fixed is not None:
            return not any(np.isin(blocks, fixed).any() for blocks in self.held.values())
        return len(self._free) >= count

    def take(self, request: int, count: int, fixed: tuple[int, ...] | None) -> Codes:
        """Blocks of a request, shape [count]."""
        if fixed is not None:
            blocks = np.array(fixed, dtype=np.int64)
        else:
            blocks = np.array(self._free[:count], dtype=np.int64)
            del self._free[:count]
        self.held[request] = blocks
        return blocks

    def take_tables(self, request: Request, endpoint: Endpoint, fixed: tuple[int, ...] | None) -> list[Codes]:
        """Blocks of a request by block table, each as long as the prompt and the lookahead, 0 where none is allocated."""
        rows = endpoint.rows(request.prompt_tokens)
        taken = self.take(request.index, sum(count - skipped for skipped, count in rows), fixed)
        if len(rows) == 1 and not rows[0][0]:
            return [taken]
        tables = []
        for skipped, count in rows:
            tables.append(np.concatenate([np.zeros(skipped, dtype=np.int64), taken[: count - skipped]]))
            taken = taken[count - skipped :]
        return tables

    def give_back(self, request: int) -> bool:
        blocks = self.held.pop(request, None)
        if blocks is None:
            return False
        self._free.extend(block for block in blocks.tolist() if block not in self._fixed)
        return True


class Transfer:
    """Run-time state of one request. `contents` numbers its blocks at decode and `prefill_contents` those at prefill.

    Both are shares of the same row of tokens, in which the request's begin at `first_token`. `state` is the number of the
    recurrent state after them: of all but the last, as decode computes that one itself (the same in every release).
    """

    def __init__(self, request: Request, first_token: int, prefill: Endpoint, decode: Endpoint) -> None:
        self.request = request
        self.index = request.index
        self.contents = first_token // decode.shape.block_size + 1 + np.arange(request.blocks, dtype=np.int64)
        self.prefill_contents = first_token // prefill.shape.block_size + 1 + np.arange(request.prefill_size, dtype=np.int64)
        self.state = np.array([first_token + request.prompt_tokens], dtype=np.int64)
        self.router_id = f"tx-{request.index}"
        self.prefill_tables: list[Codes] | None = None
        self.decode_tables: list[Codes] | None = None
        self.prefill_dp = request.prefill_dp  # where it really went: a router may err
        self.decode_dp = request.decode_dp
        self.needs: list[Needs] = []
        self.at_go: list[Count] = []
        self.layers_at_go: list[list[Count]] = []  # the same by TP rank and layer
        self.went = False
        self.ended = False
        self.bad_end = ""  # refused, failed, recomputed or crash
        self.timer_fired = False
        self.source_reused = False  # prefill gave its blocks to another request
        self.own_blocks_only = True  # a READ pairing may name blocks of others
        self.aborted = False
        self.preempted = False
        self.on_finish: Any = None
        self.started_ns = self.posted_ns = self.landed_ns = self.go_ns = -1  # when it left the router, moved, went
        self.ports_off = {"prefill": 0, "decode": 0}  # how far the ports in its id are from those that are bound
        self.home: Memory | None = None  # of the decode engine that holds its blocks now
        self._decode = decode

    def chosen(self, side: str) -> int:
        """The DP rank of a side to which the router sends it."""
        return self.request.prefill_dp if side == "prefill" else self.request.decode_dp

    def redirect(self, side: str, dp: int) -> None:
        """The router sends it to another DP rank than it would have."""
        if side == "prefill":
            self.request, self.prefill_dp = msgspec.structs.replace(self.request, prefill_dp=dp), dp
        else:
            self.request, self.decode_dp = msgspec.structs.replace(self.request, decode_dp=dp), dp

    def admit(self, tables: list[Codes], home: Memory) -> None:
        """A decode engine allocated blocks in `home`: from now on it is known which cells each of its TP ranks needs."""
        self.home = home
        self.decode_tables = tables
        tp = self._decode.tp
        self.at_go = [Count(0, 0, 0)] * tp
        self.layers_at_go = [[Count(0, 0, 0)] * len(self._decode.places) for _ in range(tp)]
        contents = [table.contents(self.contents, self.state) for table in self._decode.tables]
        self.needs = [needs_of(self._decode.groups, tables, contents, rank, tp) for rank in range(tp)]

    def finish(self) -> None:
        """The client has its answer, good or bad; whoever waits for that is told once."""
        if not self.ended:
            self.ended = True
            if self.on_finish is not None:
                self.on_finish()

    def used(self, tp: int, layer: int, count: Count) -> None:
        """Add what one layer of rank `tp` held when decode used it."""
        self.at_go[tp] += count
        self.layers_at_go[tp][layer] += count

    def used_all(self, tp: int, count: Count, by_layer: list[Count]) -> None:
        """Add what all layers of rank `tp` held when decode used them."""
        self.at_go[tp] += count
        self.layers_at_go[tp] = by_layer


def transfers_of(setup: Setup) -> list[Transfer]:
    """All requests of a run, whose prompts have no token in common."""
    transfers, token, step = [], 0, math.lcm(setup.prefill.shape.block_size, setup.decode.shape.block_size)
    for request in setup.requests:
        transfers.append(Transfer(request, token, setup.prefill, setup.decode))
        token += -(-request.prompt_tokens // step) * step
    return transfers


def response_of(params: dict[str, Any], me: Endpoint, dp: int, transfer: Transfer) -> dict[str, Any]:
    """What prefill's engine answers the router with when its request finished (vLLM's `request_finished`)."""
    assert transfer.prefill_tables is not None
    groups = []
    for ids, table in zip(transfer.prefill_tables, me.tables, strict=True):
        given: list[int] = ids.tolist()
        if kept := table.kept(me.shape.block_size):
            end = transfer.request.prefill_size if me.release.windows == "prompt_tail" else len(given)
            given = given[:end][-kept:]
        groups.append(given)
    transfer_id = params.get("transfer_id")
    if me.release.transfer_id_missing == "synthesised":
        transfer_id = params.get("transfer_id", f"sidecar-P-{transfer.index}")
    answer = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": groups[0] if me.release.answer_blocks == "flat" else groups,
        "remote_engine_id": f"{me.host_of(dp)}:{me.handshake_port}",
        "remote_host": me.host_of(dp),
        "remote_handshake_port": str(me.handshake_port),
        "remote_notify_port": str(me.notify_port),
        "remote_dp_size": me.dp,
        "tp_size": me.tp,
        "transfer_id": transfer_id,
    }
    if me.release.answer_dp == "rank":
        answer |= {"remote_dp_rank": me.own_dp(dp), "remote_dp_rank_override": True, "remote_dp_size_local": me.dp}
    return answer
