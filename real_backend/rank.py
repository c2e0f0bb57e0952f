"""One worker of one engine: a process that owns a KV cache and the worker side of the connector, driven step by step.

A step runs vLLM's own connector life cycle for a model step (`KVConnectorModelRunnerMixin`), which differs between
releases; only the forward in its middle is ours: it writes, or uses, cells layer by layer, with one collective a layer
as tensor parallelism has.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import pickle
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from real_backend.case import ConnectorCase, Coverage, Raised, RankReport
from real_backend.cells import Cells, View
from real_backend.vllm_setup import EngineConfig, connector_class, has_head_axis, layer_names

_VALUE_BYTES = 4
_LAYER_S = 0.015
"""A layer takes time, so that a transfer's first task is older than its request's end, as on a real engine."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The part of a step that is a forward pass: requests whose prompt is computed, or whose loaded cells are used."""

    fill: tuple[int, ...] = ()
    use: tuple[int, ...] = ()


@dataclass(slots=True)
class StepReport:
    """What a worker returns from a step. Request ids are the engine's; `raised` is set if the step died."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    raised: Raised | None = None


class Rank:
    """The state of one worker process. `tp_rank` counts within the DP rank of `config`."""

    def __init__(self, case: ConnectorCase, config: EngineConfig, tp_rank: int, rendezvous: Path) -> None:
        self._case = case
        self._config = config
        self._size = case.engine(config.side)
        self._tp_rank = tp_rank
        self.name = self._size.rank_name(config.side, config.dp_rank, tp_rank)
        heads = case.model.owned_heads(tp_rank, self._size.tp)
        self._cells = Cells(case.model, case.block_size, case.prompt_tokens, heads)
        self._watch = _Watch(self.name)
        self._used: dict[int, list[View]] = defaultdict(list)
        mori_io: Any = importlib.import_module("mori.io")
        mori_io.completion_delay_s = case.completion_delay_s
        self._join_group(rendezvous)
        self._connector = connector_class()(config.vllm, role("WORKER"), config.kv_cache)
        self._watch.listen(self._connector)
        self._caches, self._views = self._allocate()
        self._connector.register_kv_caches(self._caches)
        state: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
        state._KV_CONNECTOR_AGENT = self._connector  # what the model runner's mixin works on

    def step(self, scheduler_output: bytes, forward: Forward | None) -> StepReport:
        """Run one model step; a step without `forward` only moves KV. Never raises: the report says what was raised."""
        report = StepReport()
        mixin = importlib.import_module("vllm.v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
        context = importlib.import_module("vllm.forward_context").set_forward_context
        try:
            output = pickle.loads(scheduler_output)
            if forward is None:
                result = mixin.kv_connector_no_forward(output, self._config.vllm).kv_connector_output
            else:
                with context(None, self._config.vllm), mixin._get_kv_connector_output(output) as result:
                    self._forward(forward)
        except Exception as error:  # the engine would die here; the parent decides what follows
            report.raised = raised_by(self.name, error)
            return report
        if result is not None:
            report.finished_sending = set(result.finished_sending or ())
            report.finished_recving = set(result.finished_recving or ())
            report.failed_recving = set(getattr(result, "failed_recving", None) or ())
            report.invalid_blocks = set(result.invalid_block_ids or ())
        return report

    def grade(self, request: int, at_use: bool) -> Coverage:
        """Compare a request's cells with what this rank needs: as they were when layers were used, or as they are now."""
        layers = self._used[request] if at_use else self._views
        here = [each for each in self._case.requests if each.decode_dp == self._config.dp_rank]
        taken = {block for each in here for block in each.decode_blocks}
        return self._cells.grade(layers, request, self._case.requests[request].decode_blocks, taken)

    def report(self) -> RankReport:
        """Return what was seen so far."""
        return self._watch.report()

    def raised(self) -> list[Raised]:
        """Return exceptions that ended a thread of this process so far."""
        return list(self._watch.thread_errors)

    def _forward(self, forward: Forward) -> None:
        for index, name in enumerate(layer_names(self._case.model)):
            self._connector.wait_for_layer_load(name)
            for request in forward.use:
                self._used[request].append(self._views[index].copy())
            for request in forward.fill:
                self._cells.fill(self._views[index], index, request, self._case.requests[request].prefill_blocks)
            self._connector.save_kv_layer(name, self._caches[name], None)
            time.sleep(_LAYER_S)
            self._collective()

    def _collective(self) -> None:
        """Do the all-reduce that follows attention: no rank starts a layer before all have finished the one before."""
        if self._size.tp > 1:
            torch: Any = importlib.import_module("torch")
            group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            torch.distributed.all_reduce(torch.zeros(1), group=group.cpu_group)

    def _join_group(self, rendezvous: Path) -> None:
        state = importlib.import_module("vllm.distributed.parallel_state")
        config = importlib.import_module("vllm.config")
        with config.set_current_vllm_config(self._config.group):
            state.init_distributed_environment(
                world_size=self._size.tp,
                rank=self._tp_rank,
                local_rank=self._tp_rank,
                distributed_init_method=f"file://{rendezvous}",
                backend="gloo",
            )
            state.initialize_model_parallel(tensor_model_parallel_size=self._size.tp)

    def _allocate(self) -> tuple[dict[str, Any], list[View]]:
        """Make page-aligned caches, one mapping a layer, so that no release mistakes them for one shared region."""
        torch: Any = importlib.import_module("torch")
        shape = self._cache_shape()
        length = int(np.prod(shape))
        caches, views = {}, []
        for name in layer_names(self._case.model):
            pages = -(-length * _VALUE_BYTES // mmap.PAGESIZE)
            memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole: View = np.frombuffer(memory, dtype=np.int32)
            caches[name] = torch.from_numpy(whole).view(torch.float32)[:length].view(shape)
            views.append(self._cells.view(whole[:length], self._size.num_blocks))
        return caches, views

    def _cache_shape(self) -> tuple[int, ...]:
        blocks, tokens, width = self._size.num_blocks, self._case.block_size, self._case.model.width
        if not self._case.model.mla:
            return (2, blocks, tokens, len(self._cells.heads), width)
        return (blocks, 1, tokens, width) if has_head_axis() else (blocks, tokens, width)


class _Watch:
    """Records what a worker's threads see, without changing it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._notices: list[dict[str, Any]] = []
        self._warnings: list[str] = []
        self.thread_errors: list[Raised] = []
        handler = _Collector(self._warnings)
        logger = logging.getLogger("vllm")
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        threading.excepthook = self._thread_died

    def listen(self, connector: Any) -> None:
        """Record each control message on its way into the connector's handler."""
        wrapper = connector.connector_worker.moriio_wrapper
        handle = wrapper._handle_message

        def observed(message: bytes) -> None:
            self._notices.append(_decode(message))
            handle(message)

        wrapper._handle_message = observed

    def report(self) -> RankReport:
        wrote: dict[str, tuple[tuple[int, int], ...]] = defaultdict(tuple)
        read: dict[str, int] = defaultdict(int)
        failed = []
        for batch in list(importlib.import_module("mori.io").IOEngine.posted):
            if not batch.status.Succeeded():
                failed.append(f"{batch.kind} {batch.remote_engine}: {batch.status.Message() or 'not complete'}")
            elif batch.kind == "write":
                wrote[batch.remote_engine] += batch.remote_ranges
            else:
                read[batch.remote_engine] += batch.nbytes
        return RankReport(
            name=self._name,
            notices=tuple(self._notices),
            wrote_to=dict(wrote),
            read_from=dict(read),
            failed_batches=tuple(failed),
            warnings=tuple(self._warnings),
        )

    def _thread_died(self, args: threading.ExceptHookArgs) -> None:
        thread = args.thread.name if args.thread else "thread"
        self.thread_errors.append(Raised(self._name, thread, args.exc_type.__name__, str(args.exc_value)))


class _Collector(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        self._into.append(text)


def _decode(message: bytes) -> dict[str, Any]:
    msgpack = importlib.import_module("msgpack")
    try:
        data = msgpack.unpackb(message)
    except Exception:  # anything may come in from a socket; the connector judges it, not we
        data = None
    if isinstance(data, dict):
        return dict(data)
    return {"type": "text", "transfer_id": message.decode("utf-8", "replace")}


def raised_by(name: str, error: BaseException) -> Raised:
    """Say which call on the connector let an exception out: the outermost frame in the connector's module.

    When the clean-up after one call raised again, the first exception is the one to tell.
    """
    first = error
    while first.__context__ is not None and _connector_call(first.__context__) not in ("", _connector_call(first)):
        first = first.__context__
    return Raised(name, _connector_call(first) or "outside the connector", type(first).__name__, str(first))


def _connector_call(error: BaseException) -> str:
    calls = (frame.name for frame in traceback.extract_tb(error.__traceback__) if "moriio" in frame.filename)
    return next(calls, "")


def role(name: str) -> Any:
    """Return vLLM's connector role of that name, WORKER or SCHEDULER."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return base.KVConnectorRole[name]


def serve(
    case: ConnectorCase, config: EngineConfig, tp_rank: int, rendezvous: Path, steps: Connection, questions: Connection
) -> None:
    """Body of a rank's process: build the worker, then answer (method, arguments) on both pipes until the parent ends it.

    Questions have a thread of their own, so that a rank stuck in a step can still be looked into.
    """
    try:
        rank = Rank(case, config, tp_rank, rendezvous)
    except Exception as error:
        name = case.engine(config.side).rank_name(config.side, config.dp_rank, tp_rank)
        steps.send(raised_by(name, error))
        return
    threading.Thread(target=_answer, args=(rank, questions), daemon=True).start()
    steps.send(None)
    _answer(rank, steps)


def _answer(rank: Rank, pipe: Connection) -> None:
    while True:
        method, arguments = pipe.recv()
        pipe.send(getattr(rank, method)(*arguments))
