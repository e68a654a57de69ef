# SPDX-License-Identifier: Apache-2.0
"""Where the image store gets the data file of a layer that is elsewhere: see `layers.DataSource`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal, Unavailable, from_body
from opendsec.images.layers import DATA, LayerRecord, present
from opendsec.images.lazy.client import SOCKET, Connection, connect
from opendsec.images.lazy.protocol import Call, Reply, encode

TIMEOUT_S = 10.0
EAGER_TIMEOUT_S = 3600.0  # a whole download


class LazyData:
    """A whole data file beside the metadata is taken as it is; everything else comes by the loader, which must have been started.
    Blocking, from any thread."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = run_dir / SOCKET
        self._lasting: dict[str, Path] = {}

    def data_file(self, directory: Path, record: LayerRecord) -> Path:
        """Raises Missing, OpenDSecError."""
        if (directory / DATA).exists():
            return present(directory / DATA, record.data_bytes)
        known = self._lasting.get(record.digest)
        if known is not None:
            with contextlib.suppress(FileNotFoundError):  # collected, and pulled again
                if known.stat().st_size == record.data_bytes:
                    return known
        reply = self._ensure(record.digest)
        path = Path(reply.path)
        if reply.lasting:
            self._lasting[record.digest] = path
        return present(path, record.data_bytes)

    def _ensure(self, digest: str) -> Reply:
        for _ in range(3):
            connection = connect(self._socket, TIMEOUT_S)
            if connection is None:
                continue
            try:
                return _ask(connection, Call(id=1, op="ensure", digest=digest))
            except ConnectionError:
                continue
            finally:
                connection.close()
        raise Unavailable("the loader of layers does not answer", data={"digest": digest})


def _ask(connection: Connection, call: Call) -> Reply:
    connection.socket.settimeout(EAGER_TIMEOUT_S if connection.hello.mechanism == "eager" else TIMEOUT_S)
    connection.socket.sendall(encode(call))
    line = b""
    while not line.endswith(b"\n"):
        data = connection.socket.recv(65536)
        if not data:
            raise ConnectionError("the loader went away")
        line += data
    reply = msgspec.json.decode(line, type=Reply)
    if reply.error is not None:
        raise from_body(reply.error)
    if not reply.path:
        raise Internal("the loader of layers names no file")
    return reply
