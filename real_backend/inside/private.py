"""ZMQ sockets that talk to those of their own run alone."""

from __future__ import annotations

import importlib
from typing import Any


class Private:
    """A ZMQ context whose sockets all hold the secret of a run: whoever else comes to a port, ZMQ itself cuts off.

    What a stranger sends, by mistake, by a scan or on purpose, never reaches the connector, whose listeners it would end.
    Without a secret, or in a libzmq without CURVE, sockets are as they are.
    """

    def __init__(self, context: Any, secret: bytes, *, listens: bool) -> None:
        self._context, self._secret, self._listens = context, secret, listens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        """Make a socket, of either side of the handshake."""
        zmq: Any = importlib.import_module("zmq")
        made = self._context.socket(*args, **kwargs)
        if self._secret and zmq.has("curve"):
            made.curve_secretkey = secret = importlib.import_module("zmq.utils.z85").encode(self._secret)
            made.curve_publickey = public = zmq.curve_public(secret)
            if self._listens:
                made.curve_server = True
            else:
                made.curve_serverkey = public
        return made
