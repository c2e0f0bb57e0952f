"""torchrun for one machine, with a store that only this machine reaches: torchrun's own listens on every address.

Started as `python -m kvcover.real_backend.tiers.one_node OPTIONS…`, with the options of torchrun.
"""

from __future__ import annotations

import importlib
import socket
import sys
from typing import Any

from kvcover.real_backend.driver.processes import HOST


def main() -> None:
    """Make the store, then be torchrun, which takes what this process has on that port for the one that it would make."""
    distributed: Any = importlib.import_module("torch.distributed")
    with socket.socket() as own:
        own.bind((HOST, 0))
        port = own.getsockname()[1]
        store = distributed.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=own.detach()
        )
    torchrun: Any = importlib.import_module("torch.distributed.run")
    torchrun.main(["--master-addr", HOST, "--master-port", str(store.port), *sys.argv[1:]])


if __name__ == "__main__":
    main()
