"""One worker of one engine: a process that owns a KV cache and the worker side of the connector, driven step by step.

A step runs vLLM's own connector life cycle for a model step (`KVConnectorModelRunnerMixin`), which differs between
releases; only the forward in its middle is ours: it writes, or uses, cells layer by layer, with one collective a layer
as tensor parallelism has.
"""

from __future__ import annotations

import importlib
import mmap
import pickle
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.reports import Escaped, RankReport, StepReport
from kvcover.real_backend.driver.trial import BlockTables, Role, Trial
from kvcover.real_backend.inside.batch import Batch, Chunk
from kvcover.real_backend.inside.cells import TAG_BYTES, Cells, LayerView, cells_of
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.inside.mori_kind import slow_down
from kvcover.real_backend.inside.posts import record_posts
from kvcover.real_backend.inside.raising import raised_by
from kvcover.real_backend.inside.vllm_setup import (
    EngineConfig,
    connector_class,
    connector_role,
    has_head_axis,
    layer_names,
    torch_dtype,
)
from kvcover.real_backend.inside.watch import Watch
from kvcover.sim.cache.ledger import Count
from kvcover.sim.cache.wrong import Held, Place, WrongCells, summary

_LAYER_S = 0.015
"""A layer takes time, so that a transfer's first task is older than its request's end, as on a real engine."""
_SLOW_LAYERS = 4


class Worker:
    """The state of one worker process. `tp_rank` counts within the DP rank of `config`."""

    def __init__(
        self, trial: Trial, config: EngineConfig, tp_rank: int, rendezvous: Path, ports: dict[Role, Ports], late_s: float
    ) -> None:
        self._trial = trial
        self._config = config
        self._endpoint = trial.endpoint(config.role)
        self._tp_rank = tp_rank
        self.name = self._endpoint.rank_name(config.dp_rank, tp_rank)
        self._cells = cells_of(trial, config.role, tp_rank)
        self._injection = Injection(trial, config.role, config.dp_rank, self.name, ports)
        self._watch = Watch(self.name, self._injection)
        self._batch = Batch()
        self._tables: dict[int, BlockTables] = {}
        self._owners: dict[tuple[int, int], frozenset[int]] = {}  # by table and block: all requests that ever had it
        self._used: dict[int, list[LayerView]] = defaultdict(list)
        self._used_ns: dict[tuple[int, int], int] = {}  # by request and layer
        self._short: dict[tuple[int, int], int] = {}  # of these what was used with cells missing or wrong
        self._wrong: dict[int, WrongCells] = {}
        self._steps = 0
        self._doing = "starting"
        self._main = threading.get_ident()
        mori_io: Any = importlib.import_module("mori.io")
        slow_down(mori_io, trial.completion_delay_s)
        record_posts(mori_io)  # below the faults, which are put in place next: what is recorded is what was posted
        self._injection.wrap_sockets()
        self._injection.wrap_transfers()
        self._join_group(rendezvous)
        time.sleep(late_s)
        self._connector = connector_class()(config.vllm, connector_role("WORKER"), config.kv_cache)
        self._watch.listen(self._connector)
        self._caches, self._views = self._allocate()
        self._injection.layers = [
            (cache.data_ptr(), view.nbytes) for cache, view in zip(self._caches.values(), self._views, strict=True)
        ]
        self._connector.register_kv_caches(self._caches)
        state: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
        state._KV_CONNECTOR_AGENT = self._connector  # what the model runner's mixin works on

    def step(self, scheduler_output: bytes, use: tuple[int, ...], tables: Mapping[int, BlockTables]) -> StepReport:
        """Run one model step; one that computes nothing only moves KV. Never raises: the report says what was raised.

        `use`: requests whose loaded cells this step is the first to use; `tables`: blocks that requests got since the last.
        """
        report = StepReport()
        self._steps += 1
        self._doing = f"step {self._steps}"
        self._learn(tables)
        mixin = importlib.import_module("vllm.v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
        context = importlib.import_module("vllm.forward_context").set_forward_context
        try:
            output = pickle.loads(scheduler_output)
            chunks = self._batch.take(output)
            self._doing += ", a forward" if chunks else ", no forward"
            if not chunks:
                result = mixin.kv_connector_no_forward(output, self._config.vllm).kv_connector_output
            else:
                with context(None, self._config.vllm), mixin._get_kv_connector_output(output) as result:
                    self._forward(chunks, use)
        except Exception as error:  # the engine would die here; the parent decides what follows
            report.raised = raised_by(self.name, error)
            self._doing += f", raised {type(error).__name__}"
            return report
        self._doing += ", came back"
        if result is not None:
            report.finished_sending = set(result.finished_sending or ())
            report.finished_recving = set(result.finished_recving or ())
            report.failed_recving = set(getattr(result, "failed_recving", None) or ())
            report.invalid_blocks = set(result.invalid_block_ids or ())
        return report

    def _learn(self, tables: Mapping[int, BlockTables]) -> None:
        """Take in who got which blocks."""
        self._injection.learn(tables)
        self._tables |= tables
        for request, groups in tables.items():
            self._own(request, groups)

    def _own(self, request: int, groups: BlockTables) -> None:
        for table, blocks in enumerate(groups):
            for block in blocks:
                self._owners[table, block] = self._owners.get((table, block), frozenset()) | {request}

    def warm(self, cached: Mapping[int, BlockTables]) -> None:
        """Compute the first blocks of prompts, which are in the prefix cache when the run begins."""
        for request, tables in cached.items():
            self._own(request, tables)
            for index, cells in enumerate(self._by_layer().values()):
                table = tables[cells.group.table]
                cells.fill(self._views[index], index, request, table, range(len(table) * cells.group.shape.block_size))

    def grade(self, request: int, at_use: bool) -> Count:
        """Compare a request's cells with what this rank needs: as they were when layers were used, or as they are now."""
        found = Count(0, 0, 0)
        wrong: list[tuple[Place, Held]] = []
        last = self._trial.setup.requests[request].prompt_tokens - 1  # the token that decode computes by itself
        if request not in self._tables:  # it never had a block, or a planned fault took the rank that knew them
            return Count(0, 0, self._endpoint.needed(self._trial.setup.requests[request]))
        for cells in self._cells:
            blocks = self._blocks(request, cells)
            first = blocks.count(0)  # what has left the window is not needed
            position = max(0, last - 1) if cells.group.geometry.state else first
            views = [(self._used[request] if at_use else self._views)[layer] for layer in cells.group.layers]
            where = range(first, len(blocks)) if at_use else blocks[first:]
            by_layer = cells.grade_each(views, request, where, position)
            if at_use:
                short = [(request, layer) for layer, each in by_layer.items() if each.covered < each.cells]
                self._short |= {each: self._used_ns[each] for each in short if each in self._used_ns}
            count = sum(by_layer.values(), Count(0, 0, 0))
            wrong += cells.wrong(views, request, where, position) if count.wrong else []
            found += count
        if wrong and request not in self._wrong:  # as they were at go, if it came to that
            kind = self._trial.setup.geometry
            self._wrong[request] = summary(self.name, request, wrong, kind.planes, kind.kv_heads)
        return found

    def _blocks(self, request: int, cells: Cells) -> tuple[int, ...]:
        """The blocks of a request's prompt in the table of these layers, without those allocated beyond it."""
        prompt = -(-self._trial.setup.requests[request].prompt_tokens // self._endpoint.shape.block_size)
        return self._tables.get(request, ((),) * len(self._endpoint.tables))[cells.group.table][:prompt]

    def stray(self) -> int:
        """Count cells that changed though no request ever had them, or that hold content of one that never did."""
        if self._config.role == "prefill":
            return 0
        found = 0
        for cells in self._cells:
            views = [self._views[layer] for layer in cells.group.layers]
            null = () if self._trial.alike else (0,)  # vLLM's null block may hold anything
            found += cells.changed(views, {block for _, block in self._owners}.union(null))
            of_each: dict[frozenset[int], list[int]] = defaultdict(list)
            for (table, block), requests in self._owners.items():
                if block and table == cells.group.table:
                    of_each[requests].append(block)
            found += sum(cells.foreign(views, requests, blocks) for requests, blocks in of_each.items())
        return found

    def learn_ports(self, bound: dict[int, str]) -> None:
        """Learn who listens where."""
        self._injection.owners = bound

    def bound(self) -> tuple[int, ...]:
        """Return the ports that this rank listens on so far."""
        return tuple(port for _, port in self._injection.bound)

    def report(self) -> RankReport:
        """Return what was seen so far."""
        short = tuple((at, request, layer) for (request, layer), at in self._short.items())
        return replace(self._watch.report(), last_step=self._where(), wrong=tuple(self._wrong.values()), short=short)

    def _where(self) -> str:
        """Say what the rank did last, and where in vLLM it stands if it hasn't come back."""
        if self._doing.endswith("came back"):
            return self._doing
        frames = traceback.extract_stack(sys._current_frames().get(self._main))
        inside = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames if "vllm" in frame.filename]
        return f"{self._doing}, in {inside[-1]}" if inside else self._doing

    def raised(self) -> list[Escaped]:
        """Return exceptions that ended a thread of this process so far."""
        return list(self._watch.thread_errors)

    def _forward(self, chunks: list[Chunk], use: tuple[int, ...]) -> None:
        for index, (name, cells) in enumerate(self._by_layer().items()):
            self._connector.wait_for_layer_load(name)
            for request in use:
                self._used_ns.setdefault((request, index), time.monotonic_ns())
                del self._used[request][index:]  # it uses them again after it was preempted
                self._used[request].append(self._views[index][:, list(self._blocks(request, cells))])
            for chunk in chunks if self._config.role == "prefill" else ():  # decode's own tokens are no delivery
                request = self._injection.request_of(chunk.request_id)
                cells.fill(self._views[index], index, request, chunk.tables[cells.group.table], chunk.tokens)
            self._connector.save_kv_layer(name, self._caches[name], None)
            time.sleep(_LAYER_S if index < _SLOW_LAYERS else _LAYER_S / 10)
            self._collective()

    def _by_layer(self) -> dict[str, Cells]:
        """The cells of each layer, by the layer's name, in order."""
        names = layer_names(self._trial.setup.geometry)
        return {name: self._cells[group] for name, (group, _) in zip(names, self._endpoint.places, strict=True)}

    def _collective(self) -> None:
        """Do the all-reduce that follows attention: no rank starts a layer before all have finished the one before."""
        if self._endpoint.tp > 1:
            torch: Any = importlib.import_module("torch")
            group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            torch.distributed.all_reduce(torch.zeros(1), group=group.cpu_group)

    def _join_group(self, rendezvous: Path) -> None:
        state = importlib.import_module("vllm.distributed.parallel_state")
        config = importlib.import_module("vllm.config")
        with config.set_current_vllm_config(self._config.group):
            state.init_distributed_environment(
                world_size=self._endpoint.tp,
                rank=self._tp_rank,
                local_rank=self._tp_rank,
                distributed_init_method=f"file://{rendezvous}",
                backend="gloo",
            )
            state.initialize_model_parallel(tensor_model_parallel_size=self._endpoint.tp)

    def _allocate(self) -> tuple[dict[str, Any], list[LayerView]]:
        """Make page-aligned caches, one mapping a layer, so that no release mistakes them for one shared region."""
        torch: Any = importlib.import_module("torch")
        caches, views = {}, []
        for name, cells in self._by_layer().items():
            shape = self._cache_shape(cells)
            length = int(np.prod(cells.memory()[0]))
            pages = -(-length * TAG_BYTES // mmap.PAGESIZE)
            memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole: LayerView = np.frombuffer(memory, dtype=np.int32)
            dtype = torch.uint8 if cells.group.geometry.state else torch_dtype(self._trial.kv_dtype(self._config.role))
            caches[name] = torch.from_numpy(whole)[:length].view(dtype).view(shape)
            views.append(cells.view(whole[:length]))
        return caches, views

    def _cache_shape(self, cells: Cells) -> tuple[int, ...]:
        """Return the shape that vLLM's model runner would give: a latent's head is an axis, K and V packed are none."""
        *lengths, _ = cells.memory()[0]
        kind, shape = cells.group.geometry, cells.group.shape
        if kind.state:  # pages of bytes
            return shape.num_blocks, 1, 1, shape.planes * shape.heads * kind.head_dim * TAG_BYTES
        if kind.mla:
            layout = self._endpoint.side.layout or ("standard" if has_head_axis() else "latent")
            axes = (1, shape.block_size) if layout == "standard" else (shape.block_size,)
            return shape.num_blocks, *axes, kind.head_dim
        return (*lengths[:-1], 2 * kind.head_dim) if shape.apart == 1 else (*lengths, kind.head_dim)


def serve(
    trial: Trial,
    config: EngineConfig,
    tp_rank: int,
    rendezvous: Path,
    ports: dict[Role, Ports],
    late_s: float,
    steps: Connection,
    questions: Connection,
    make: Callable[..., Worker] = Worker,
) -> None:
    """Body of a rank's process: build the worker, then answer (method, arguments) on both pipes until the driver ends it.

    Questions have a thread of their own, so that a rank stuck in a step can still be looked into. A rank that is late on
    purpose doesn't say that it is up.
    """
    try:
        worker = make(trial, config, tp_rank, rendezvous, ports, late_s)
    except Exception as error:
        name = trial.endpoint(config.role).rank_name(config.dp_rank, tp_rank)
        traceback.print_exc()
        steps.send(raised_by(name, error))
        return
    threading.Thread(target=_answer, args=(worker, questions), daemon=True).start()
    if not late_s:
        steps.send(None)
    _answer(worker, steps)


def _answer(worker: Worker, pipe: Connection) -> None:
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(getattr(worker, method)(*arguments))
