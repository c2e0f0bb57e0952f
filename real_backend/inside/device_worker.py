"""The rank body under torchrun: the connector tier's rank, with its caches on a GPU if there is one and any `mori.io`."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.trial import Role, Trial
from kvcover.real_backend.inside.gpu_worker import GpuWorker
from kvcover.real_backend.inside.vllm_setup import LOOPBACK, MORIIO, EngineConfig, drop_legacy_timeout
from kvcover.sim.errors import TierError


def prepare_device(tree: Path | None, read_abort_s: float, host: str) -> None:
    """Import vLLM with the real `mori.io`. Raises TierError if `mori.io` can't be imported, or is the stand-in."""
    os.environ.update(
        VLLM_HOST_IP=host,
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_DISABLE_PYNCCL="1",  # ranks may share a GPU, which NCCL refuses; the only collective here is on the host
        VLLM_MORIIO_TRANSFER_TIMEOUT_S=str(math.ceil(read_abort_s)),
    )
    if tree is not None:
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    try:
        mori_io = importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise TierError("--tier hardware", f"mori.io can't be imported: {error}", "see `kvcover doctor --tier hardware`") from None
    if str(mori_io.__file__).startswith(str(LOOPBACK)):
        raise TierError("--tier hardware", "mori.io is the loopback", "take real_backend/moriio/loopback off PYTHONPATH")
    connector: Any = importlib.import_module(f"{MORIIO}.moriio_connector")
    drop_legacy_timeout()
    # Only the backend's name is used, for both sides to be the same: there is no attention here.
    connector.get_attn_backend = lambda *_args, **_kwargs: SimpleNamespace(get_name=lambda: "NONE")


def suit(config: EngineConfig, host: str, transport: str, device: str) -> None:
    """Adapt an engine's configuration to the machine: its address, MoRI's transport and the kind of device."""
    vllm_config = importlib.import_module("vllm.config")
    for each in (config.vllm, config.group):
        each.kv_transfer_config.kv_connector_extra_config |= {"host_ip": host, "backend": transport}
        each.device_config = vllm_config.DeviceConfig(device)
        each.parallel_config.disable_custom_all_reduce = True


@dataclass(frozen=True, slots=True)
class Posted:
    """One batch, as the connector gave it to `mori.io`."""

    kind: str
    remote_engine: str
    remote_ranges: tuple[tuple[int, int], ...]
    status: Any
    local: int
    at_ns: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(length for _, length in self.remote_ranges)


class _Session:
    """A session of the real `mori.io` that notes what is posted on it."""

    def __init__(self, session: Any, local: Any, remote: Any, posted: list[Posted]) -> None:
        self._session, self._local, self._remote, self._posted = session, local, remote, posted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batch_read(self, *args: Any) -> Any:
        """Pass a read on."""
        return self._note("read", args, self._session.batch_read(*args))

    def batch_write(self, *args: Any) -> Any:
        """Pass a write on."""
        return self._note("write", args, self._session.batch_write(*args))

    def _note(self, kind: str, args: tuple[Any, ...], status: Any) -> Any:
        ranges = tuple((int(self._remote.data) + offset, size) for offset, size in zip(args[1], args[2], strict=False))
        last = int(self._local.data) + (args[0][-1] + args[2][-1] - 1 if args[0] and args[2] else 0)
        self._posted.append(Posted(kind, str(self._remote.engine_key), ranges, status, last, time.monotonic_ns()))
        return status


def record_posts(mori_io: Any) -> None:
    """Let the real `mori.io` keep the list of posted batches that the stand-in keeps by itself."""
    engine = mori_io.IOEngine
    if hasattr(engine, "posted"):
        return
    posted: list[Posted] = []
    engine.posted = posted
    create = engine.create_session

    def create_session(self: Any, local_mem: Any, remote_mem: Any) -> Any:
        session = create(self, local_mem, remote_mem)
        return None if session is None else _Session(session, local_mem, remote_mem, posted)

    engine.create_session = create_session


class DeviceWorker(GpuWorker):
    """A rank whose peers in its TP group meet in a torchrun store, and whose caches are on `device`."""

    def __init__(self, trial: Trial, config: EngineConfig, tp_rank: int, ports: dict[Role, Ports], store: Any, device: str) -> None:
        self._store = store
        # Below the faults, which are put in place next: what is recorded is what was posted. It is also kept: the library
        # writes into a status until its batch is complete, and a fault may let go of it before.
        record_posts(importlib.import_module("mori.io"))
        super().__init__(device, trial, config, tp_rank, Path(), ports, 0.0)

    def _join_group(self, rendezvous: Path) -> None:
        """Make the TP group a world of its own, as vLLM wants it; `rendezvous` is a file that other nodes can't see."""
        torch: Any = importlib.import_module("torch")
        name = f"{self._config.role}{self._config.dp_rank}"
        store = torch.distributed.PrefixStore(name, self._store)
        torch.distributed.init_process_group("gloo", store=store, rank=self._tp_rank, world_size=self._endpoint.tp)
        state = importlib.import_module("vllm.distributed.parallel_state")
        config = importlib.import_module("vllm.config")
        state.set_custom_all_reduce(False)
        with config.set_current_vllm_config(self._config.group):
            state.init_distributed_environment(
                world_size=self._endpoint.tp, rank=self._tp_rank, local_rank=_index_of(self._device), backend="gloo"
            )
            state.initialize_model_parallel(tensor_model_parallel_size=self._endpoint.tp, backend="gloo")


def _index_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)
