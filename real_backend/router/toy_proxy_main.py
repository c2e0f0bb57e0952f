"""Starts vLLM's toy proxy in a process of its own: its request handler and its listener for registrations, on loopback.

`python toy_proxy_main.py FILE PORT DISCOVERY`; the file's own start-up block would listen on every address. Imports no kvcover.
"""

from __future__ import annotations

import importlib.util
import sys


def main(file: str, port: int, discovery: int) -> None:
    """Load the proxy and serve it until the process is ended."""
    spec = importlib.util.spec_from_file_location("moriio_toy_proxy_server", file)
    assert spec is not None and spec.loader is not None
    proxy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxy)
    proxy.start_service_discovery("127.0.0.1", discovery)
    proxy.app.run(host="127.0.0.1", port=port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
