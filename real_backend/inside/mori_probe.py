"""Two engines of one process exchange a batch over the `mori.io` in a folder: `python -m … FOLDER` says `exchanged`."""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    """Print `exchanged` if the bytes are right, what is wrong otherwise."""
    sys.path.insert(0, sys.argv[1])
    import torch
    from mori import io

    tensors: list[Any] = [torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)]
    engines: list[Any] = [io.IOEngine(name, io.IOEngineConfig("127.0.0.1", 0)) for name in ("one", "two")]
    settings = io.RdmaBackendConfig(1, -1, 1, io.PollCqMode.POLLING, enable_notification=False)
    for engine in engines:
        engine.create_backend(io.BackendType.RDMA, settings)
    theirs, ours = (engine.register_torch_tensor(tensor) for engine, tensor in zip(engines, tensors, strict=True))
    engines[1].register_remote_engine(engines[0].get_engine_desc())
    engines[0].register_remote_engine(engines[1].get_engine_desc())
    status = engines[1].create_session(ours, theirs).batch_read([0, 64], [100, 20], [50, 30], engines[1].allocate_transfer_uid())
    status.Wait()
    right = tensors[1][:50].tolist() == list(range(100, 150)) and tensors[1][64:94].tolist() == list(range(20, 50))
    print("exchanged" if status.Succeeded() and right else f"{status.Code()}: {status.Message()}, bytes right: {right}", flush=True)
    os._exit(0)  # its threads end with the process


if __name__ == "__main__":
    main()
