"""A rank whose caches are in GPU memory: `torch.cuda`, which is the same on ROCm. Several ranks may share a GPU."""

from __future__ import annotations

import importlib
import math
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from kvcover.real_backend.driver.reports import StepReport
from kvcover.real_backend.driver.trial import BlockTables, Trial
from kvcover.real_backend.inside import worker
from kvcover.real_backend.inside.cells import LayerView
from kvcover.real_backend.inside.device_cells import DeviceCells
from kvcover.real_backend.inside.vllm_setup import EngineConfig, layer_names, torch_dtype
from kvcover.sim import launch

_SEGMENT = 2 << 20
"""Torch hands out device memory in segments of this size: a cache that fills its segments shares none."""
_LOOK = "import torch; print(*(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())), sep=chr(10))"


class GpuWorker(worker.Worker):
    """As on a CPU, with caches on `device`, such as `cuda:0`; on `cpu` they are torch's too, to try this without a GPU."""

    def __init__(self, device: str, *arguments: Any) -> None:
        self._device = device
        super().__init__(*arguments)

    def step(self, scheduler_output: bytes, use: tuple[int, ...], tables: Mapping[int, BlockTables]) -> StepReport:
        """As on a CPU; when it returns the GPU is done too, as sampling waits for a forward pass."""
        report = super().step(scheduler_output, use, tables)
        if self._device != "cpu":
            importlib.import_module("torch").cuda.synchronize()
        return report

    def _allocate(self) -> tuple[dict[str, Any], list[LayerView]]:
        torch: Any = importlib.import_module("torch")
        (host_cells,) = self._cells  # models of unlike layers are refused on this tier
        cells = DeviceCells(**{each.name: getattr(host_cells, each.name) for each in fields(host_cells)})
        if self._device == "cpu":
            caches, _ = super()._allocate()
            self._cells = (cells,)
            flat = [cache.view(-1).view(torch.int32) for cache in caches.values()]
            return caches, [cells.view(each) for each in flat]
        self._cells = (cells,)
        torch.cuda.set_device(self._device)
        shape = self._cache_shape(cells)
        length, names = math.prod(cells.memory()[0]), layer_names(self._trial.setup.geometry)
        caches, views = {}, []
        for name in names:
            whole = torch.zeros(-(-length * 4 // _SEGMENT) * _SEGMENT // 4, dtype=torch.int32, device=self._device)
            caches[name] = whole[:length].view(torch_dtype(self._trial.kv_dtype(self._config.role))).view(shape)
            views.append(cells.view(whole[:length]))
        self._warm_up(cells, views[0])
        return caches, views

    def _warm_up(self, cells: DeviceCells, view: LayerView) -> None:
        """Compile and load what a run uses, so that its first layer takes no longer than the others."""
        torch: Any = importlib.import_module("torch")
        cells.fill(view, 0, 0, (0,), range(1))
        cells.grade([view], 0, (0,))
        cells.changed([view], ())
        torch.as_tensor(view).zero_()
        torch.cuda.synchronize()


def serve_on(gpus: int, trial: Trial, config: EngineConfig, tp_rank: int, *arguments: Any) -> None:
    """Body of a rank's process on a machine with so many GPUs, which the ranks of an engine take in turn."""
    rendezvous, ports, late_s, steps, questions = arguments
    worker.serve(trial, config, tp_rank, rendezvous, ports, late_s, steps, questions, partial(GpuWorker, f"cuda:{tp_rank % gpus}"))


def gpu_names() -> list[str]:
    """The GPUs that torch sees, looked for in a process of its own: no GPU may be in use before a fork."""
    with launch.Launched(launch.python("-c", _LOOK), stdout=subprocess.PIPE) as look:
        return look.output()[0].strip().splitlines()


def leave_no_handles(pid: int) -> None:
    """Remove what torch and the driver keep in shared memory for GPU memory that a process, which has ended, had shared."""
    for pattern in (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*"):
        for left in Path("/dev/shm").glob(pattern):
            left.unlink(missing_ok=True)
