"""The rank body under torchrun: the connector tier's rank, with its caches on a GPU if there is one and any `mori.io`."""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.trial import Role, Trial
from kvcover.real_backend.inside.gpu_worker import GpuWorker
from kvcover.real_backend.inside.vllm_setup import LOOPBACK, MORIIO, EngineConfig, drop_legacy_timeout
from kvcover.sim.cache.ledger import Count
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


class DeviceWorker(GpuWorker):
    """A rank whose peers in its TP group meet in a torchrun store, and whose caches are on `device`.

    With `wrong_byte` one byte of what it received is wrong when it is first looked at, to see that this is seen.
    """

    def __init__(
        self,
        trial: Trial,
        config: EngineConfig,
        tp_rank: int,
        ports: dict[Role, Ports],
        store: Any,
        device: str,
        wrong_byte: bool = False,
    ) -> None:
        self._store, self._wrong_byte = store, wrong_byte
        super().__init__(device, trial, config, tp_rank, Path(), ports, 0.0)

    def grade(self, request: int, at_use: bool) -> Count:
        if self._wrong_byte:
            self._wrong_byte = False
            self._views[0][0, self._blocks(request, self._cells[0])[0], 0, 0, 0] ^= 1
        return super().grade(request, at_use)

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
