"""One worker of one engine: a process that owns a KV cache and the worker side of the connector, driven step by step.

A step runs vLLM's own connector life cycle for a model step (`KVConnectorModelRunnerMixin`), which differs between
releases; only the forward in its middle is ours: it writes, or uses, cells layer by layer, with one collective a layer
as tensor parallelism has.
"""

from __future__ import annotations

import errno
import importlib
import logging
import mmap
import pickle
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kvcover.real_backend.driver.case import ConnectorCase, Coverage, Forward, ModelShape, Raised, RankReport, Side, StepReport
from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.inside.cells import Cells, View
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.inside.vllm_setup import EngineConfig, connector_class, has_head_axis, layer_names, torch_dtype
from kvcover.sim.cache.geometry import AXES
from kvcover.sim.cache.presets import DTYPE_BYTES

_VALUE_BYTES = 4
_LAYER_S = 0.015
"""A layer takes time, so that a transfer's first task is older than its request's end, as on a real engine."""
_SLOW_LAYERS = 4


@dataclass(slots=True)
class Part:
    """Layers of a rank that are alike and share a block table."""

    cells: Cells
    table: int


class Rank:
    """The state of one worker process. `tp_rank` counts within the DP rank of `config`."""

    def __init__(
        self, case: ConnectorCase, config: EngineConfig, tp_rank: int, rendezvous: Path, ports: dict[Side, Ports], late_s: float
    ) -> None:
        self._case = case
        self._config = config
        self._size = case.engine(config.side)
        self._tp_rank = tp_rank
        self.name = self._size.rank_name(config.side, config.dp_rank, tp_rank)
        self._parts = _parts_of(case, config.side, tp_rank)
        self._injection = Injection(case, config.side, self.name, ports)
        self._watch = _Watch(self.name, self._injection)
        self._used: dict[int, list[View]] = defaultdict(list)
        self._steps = 0
        self._doing = "starting"
        self._main = threading.get_ident()
        mori_io: Any = importlib.import_module("mori.io")
        mori_io.completion_delay_s = case.completion_delay_s
        self._injection.wrap_sockets()
        self._injection.wrap_transfers()
        self._join_group(rendezvous)
        time.sleep(late_s)
        self._connector = connector_class()(config.vllm, role("WORKER"), config.kv_cache)
        self._watch.listen(self._connector)
        self._caches, self._views = self._allocate()
        self._injection.layers = [
            (cache.data_ptr(), view.nbytes) for cache, view in zip(self._caches.values(), self._views, strict=True)
        ]
        self._connector.register_kv_caches(self._caches)
        state: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
        state._KV_CONNECTOR_AGENT = self._connector  # what the model runner's mixin works on

    def step(self, scheduler_output: bytes, forward: Forward | None) -> StepReport:
        """Run one model step; a step without `forward` only moves KV. Never raises: the report says what was raised."""
        report = StepReport()
        self._steps += 1
        self._doing = f"step {self._steps}, " + ("no forward" if forward is None else "a forward")
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
            self._doing += f", raised {type(error).__name__}"
            return report
        self._doing += ", came back"
        if result is not None:
            report.finished_sending = set(result.finished_sending or ())
            report.finished_recving = set(result.finished_recving or ())
            report.failed_recving = set(getattr(result, "failed_recving", None) or ())
            report.invalid_blocks = set(result.invalid_block_ids or ())
        return report

    def grade(self, request: int, at_use: bool) -> Coverage:
        """Compare a request's cells with what this rank needs: as they were when layers were used, or as they are now."""
        graded = []
        for part in self._parts:
            blocks = self._blocks(request, part.table)
            first = blocks.count(0)  # what has left the window is not needed
            position = max(0, self._case.tokens(request) - 2) if part.cells.model.state else first  # decode computes the last token
            views = [(self._used[request] if at_use else self._views)[layer] for layer in part.cells.numbers]
            where = range(first, len(blocks)) if at_use else blocks[first:]
            taken = None if at_use else self._taken()
            graded.append((part.cells.cells(len(where)), part.cells.grade(views, request, where, taken, position)))
        return Coverage.over(graded)

    def _blocks(self, request: int, table: int) -> tuple[int, ...]:
        """The blocks of a request's prompt in one of its tables, without those allocated beyond it."""
        case, side = self._case, self._config.side
        return case.requests[request].tables(side, case.tables(side))[table][
            : -(-case.tokens(request) // self._size.cache.block_size)
        ]

    def stray(self) -> int:
        """Count cells that changed although they belong to no request, or hold another request's content."""
        if self._config.side == "prefill":
            return 0
        dp = self._config.dp_rank
        mine = [(index, each) for index, each in enumerate(self._case.requests) if each.decode_dp == dp]
        found = 0
        for part in self._parts:
            views = [self._views[layer] for layer in part.cells.numbers]
            found += part.cells.grade(views, 0, (), self._taken()).stray
            for index, _ in mine:
                found += part.cells.foreign(views, index, [block for block in self._blocks(index, part.table) if block])
        return found

    def meet(self, bound: dict[int, str]) -> None:
        """Learn who listens where."""
        self._injection.meet(bound)

    def bound(self) -> tuple[int, ...]:
        """Return the ports that this rank listens on so far."""
        return tuple(self._injection.bound)

    def _taken(self) -> set[int]:
        here = [each for each in self._case.requests if each.decode_dp == self._config.dp_rank]
        null = () if self._case.model.alike else (0,)  # vLLM's null block may hold anything
        return {block for each in here for block in each.decode_blocks}.union(null)

    def report(self) -> RankReport:
        """Return what was seen so far."""
        return replace(self._watch.report(), last_step=self._where())

    def _where(self) -> str:
        """Say what the rank did last, and where in vLLM it stands if it hasn't come back."""
        if self._doing.endswith("came back"):
            return self._doing
        frames = traceback.extract_stack(sys._current_frames().get(self._main))
        inside = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames if "vllm" in frame.filename]
        return f"{self._doing}, in {inside[-1]}" if inside else self._doing

    def raised(self) -> list[Raised]:
        """Return exceptions that ended a thread of this process so far."""
        return list(self._watch.thread_errors)

    def _forward(self, forward: Forward) -> None:
        parts = {layer: part for part in self._parts for layer in part.cells.numbers}
        for index, name in enumerate(layer_names(self._case.model)):
            self._connector.wait_for_layer_load(name)
            part = parts[index]
            for request in forward.use:
                self._used[request].append(self._views[index][:, list(self._blocks(request, part.table))])
            for request, tokens in forward.fill.items():
                first = tokens - 1 if part.cells.model.state else 0
                part.cells.fill(self._views[index], index, request, self._blocks(request, part.table), first)
            self._connector.save_kv_layer(name, self._caches[name], None)
            time.sleep(_LAYER_S if index < _SLOW_LAYERS else _LAYER_S / 10)
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
        parts = {layer: part for part in self._parts for layer in part.cells.numbers}
        caches, views = {}, []
        for layer, name in enumerate(layer_names(self._case.model)):
            shape = self._cache_shape(parts[layer].cells)
            length = int(np.prod(parts[layer].cells.memory(self._size.num_blocks)[0]))
            pages = -(-length * _VALUE_BYTES // mmap.PAGESIZE)
            memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole: View = np.frombuffer(memory, dtype=np.int32)
            dtype = torch.uint8 if parts[layer].cells.model.state else torch_dtype(self._size.cache)
            caches[name] = torch.from_numpy(whole)[:length].view(dtype).view(shape)
            views.append(parts[layer].cells.view(whole[:length], self._size.num_blocks))
        return caches, views

    def _cache_shape(self, cells: Cells) -> tuple[int, ...]:
        """Return the shape that vLLM's model runner would give: a latent's head is an axis, K and V packed are none."""
        *lengths, _ = cells.memory(self._size.num_blocks)[0]
        model, axes = cells.model, cells.axes
        if model.state:  # pages of bytes
            return self._size.num_blocks, 1, 1, model.planes * len(cells.heads) * model.width * _VALUE_BYTES
        if model.mla:
            layout = self._size.cache.layout or ("standard" if has_head_axis() else "latent")
            blocks, tokens = self._size.num_blocks, cells.block_size
            return (blocks, 1, tokens, model.width) if layout == "standard" else (blocks, tokens, model.width)
        return (*lengths[:-1], 2 * model.width) if axes.endswith("p") else (*lengths, model.width)


def _parts_of(case: ConnectorCase, side: Side, tp_rank: int) -> tuple[Part, ...]:
    """Sort the layers of a rank by what they are like and by block table."""
    sorts: dict[tuple[int, ModelShape], list[int]] = defaultdict(list)
    for layer, table in enumerate(case.table_of(side)):
        sorts[table, case.model.at(layer)].append(layer)
    return tuple(
        Part(replace(_cells_of(case, side, kind, tp_rank), layers=tuple(layers), room=case.model.room), table)
        for (table, kind), layers in sorts.items()
    )


def _cells_of(case: ConnectorCase, side: Side, model: ModelShape, tp_rank: int) -> Cells:
    size = case.engine(side)
    if model.state:
        return Cells(model, 1, case.prompt_tokens, model.owned_heads(tp_rank, size.tp), AXES["interleaved", "NHD"])
    form = size.cache
    layout = form.layout or ("latent" if model.mla else "split")
    orders = {order: axes for (name, order), axes in AXES.items() if name == layout}
    axes = "bt" if model.mla else orders[form.order or next(iter(orders))]
    unlike = side == "decode" and form.kv_dtype != case.prefill.cache.kv_dtype
    width = model.width * DTYPE_BYTES[form.kv_dtype or "fp32"] // _VALUE_BYTES
    return Cells(model, form.block_size, case.prompt_tokens, model.owned_heads(tp_rank, size.tp), axes, width, unlike)


class _Watch:
    """Records what a worker's threads see, without changing it."""

    def __init__(self, name: str, injection: Injection) -> None:
        self._name = name
        self._injection = injection
        self._notices: list[dict[str, Any]] = []
        self._warnings: list[str] = []
        self.thread_errors: list[Raised] = []
        handler = _Collector(self._warnings, self._logged)
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
        reads = 0
        failed = []
        for batch in list(importlib.import_module("mori.io").IOEngine.posted):
            if not batch.status.Succeeded():
                failed.append(f"{batch.kind} {batch.remote_engine}: {batch.status.Message() or 'not complete'}")
            elif batch.kind == "write":
                wrote[batch.remote_engine] += batch.remote_ranges
            else:
                read[batch.remote_engine] += batch.nbytes
                reads += 1
        return RankReport(
            name=self._name,
            notices=tuple(self._notices),
            wrote_to=dict(wrote),
            read_from=dict(read),
            reads=reads,
            failed_batches=(*failed, *self._injection.failed),
            warnings=tuple(self._warnings),
            bound=tuple(self._injection.bound),
            dialled=tuple(dict.fromkeys(self._injection.dialled)),
        )

    def _thread_died(self, args: threading.ExceptHookArgs) -> None:
        thread = args.thread.name if args.thread else "thread"
        broken = "" if args.exc_value is None else what_is_broken(args.exc_value)
        self.thread_errors.append(Raised(self._name, thread, args.exc_type.__name__, str(args.exc_value), broken=broken))

    def _logged(self, where: str, error: BaseException) -> None:
        """Keep an error that the connector caught and only logged if it says that the code or the machine is broken."""
        if broken := what_is_broken(error):
            self.thread_errors.append(Raised(self._name, where, type(error).__name__, str(error), broken=broken))


class _Collector(logging.Handler):
    def __init__(self, into: list[str], on_error: Callable[[str, BaseException], None]) -> None:
        super().__init__(logging.WARNING)
        self._into, self._on_error = into, on_error

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        errors = [each for each in record.args or () if isinstance(each, BaseException)] if isinstance(record.args, tuple) else []
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            errors.append(record.exc_info[1])
        self._into.append(text)
        if errors and "moriio" in record.pathname:
            self._on_error(record.funcName, errors[-1])


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
    call = _connector_call(first)
    misfit = where_it_failed(first) if not call and isinstance(first, _MISFITS) else ""
    return Raised(name, call or "outside the connector", type(first).__name__, str(first), misfit, what_is_broken(first))


_MISFITS = (AttributeError, TypeError, ImportError, NameError)
"""What a harness meets that calls things which aren't there any more."""


_MACHINE = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EIO, errno.EROFS,
    errno.ENOENT, errno.ENODEV, errno.ENXIO,
)  # fmt: skip
"""Of files, memory and devices. Not those of addresses and peers: there the connector, or a fault, may have said where to go."""


def what_is_broken(error: BaseException) -> str:
    """Say which error, this one or a cause of it, is of a kind that no protocol makes; empty if there is none.

    A name that is nowhere, a module or a part of one that is missing, no memory, a file or device of the machine, a region
    that MoRI won't register. A KeyError, an AssertionError, a variable that this path never set are the connector's own.
    """
    each: BaseException | None = error
    while each is not None:
        missing = isinstance(each, NameError) and not isinstance(each, UnboundLocalError)
        missing |= isinstance(each, AttributeError) and isinstance(each.obj, ModuleType)
        number = getattr(each, "errno", None)
        machine = number in _MACHINE or (isinstance(each, OSError) and number is None and type(each) is OSError)  # dlopen's
        machine |= isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError"  # torch's is a RuntimeError
        if missing or machine or isinstance(each, (ImportError, SyntaxError)) or _registration_refused(each):
            return f"{type(each).__name__}: {each}"
        each = each.__cause__
    return ""


def _registration_refused(error: BaseException) -> bool:
    """Whether MoRI wouldn't register a region. That it isn't contiguous is for the connector to see to."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    inside = any(frame.name.startswith("register_") and re.search(r"/mori/io(\.py$|/)", frame.filename) for frame in last)
    return inside and "contiguous" not in str(error)


def where_it_failed(error: BaseException) -> str:
    """Say which line of the harness let an exception out, and the exception."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "real_backend" in frame.filename]
    line = f"`{ours[-1].line}` in {ours[-1].name}" if ours else "a call"
    return f"{line}: {type(error).__name__}: {error}"


def _connector_call(error: BaseException) -> str:
    calls = (frame.name for frame in traceback.extract_tb(error.__traceback__) if "moriio" in frame.filename)
    return next(calls, "")


def role(name: str) -> Any:
    """Return vLLM's connector role of that name, WORKER or SCHEDULER."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return base.KVConnectorRole[name]


def serve(
    case: ConnectorCase,
    config: EngineConfig,
    tp_rank: int,
    rendezvous: Path,
    ports: dict[Side, Ports],
    late_s: float,
    steps: Connection,
    questions: Connection,
) -> None:
    """Body of a rank's process: build the worker, then answer (method, arguments) on both pipes until the driver ends it.

    Questions have a thread of their own, so that a rank stuck in a step can still be looked into. A rank that is late on
    purpose doesn't say that it is up.
    """
    try:
        rank = Rank(case, config, tp_rank, rendezvous, ports, late_s)
    except Exception as error:
        name = case.engine(config.side).rank_name(config.side, config.dp_rank, tp_rank)
        traceback.print_exc()
        steps.send(raised_by(name, error))
        return
    threading.Thread(target=_answer, args=(rank, questions), daemon=True).start()
    if not late_s:
        steps.send(None)
    _answer(rank, steps)


def _answer(rank: Rank, pipe: Connection) -> None:
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(getattr(rank, method)(*arguments))
