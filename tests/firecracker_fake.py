# SPDX-License-Identifier: Apache-2.0
"""Stands in for jailer and Firecracker: takes the jailer's arguments, serves the API by its documented rules, keeps a log of calls.

    python -m tests.firecracker_fake --id NAME --exec-file ... --chroot-base-dir DIR ... -- --api-sock /api.sock

Rules it holds: devices before the start only; one start; pausing a running machine only; snapshots of paused ones; loading only into one
that was told nothing yet. Files are looked for in the jail. Its vsock answers CONNECT to port 1024 and echoes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

BEFORE = ("/machine-config", "/boot-source", "/drives/", "/network-interfaces/", "/vsock", "/balloon", "/entropy")


class Fault(Exception):
    pass


class Machine:
    def __init__(self, root: Path) -> None:
        self.root, self.state, self.told = root, "new", False
        self.vsock: asyncio.Server | None = None

    def file(self, path: object) -> Path:
        found = self.root / str(path).lstrip("/")
        if not found.exists():
            raise Fault(f"No such file or directory: {path}")
        return found

    async def handle(self, method: str, path: str, body: dict[str, object]) -> bytes:
        with (self.root.parent / "calls").open("a") as log:
            log.write(json.dumps([method, path, body]) + "\n")
        if (method, path) == ("GET", "/"):
            return json.dumps({"state": self.state}).encode()
        if method == "PUT" and path.startswith(BEFORE):
            if self.state != "new":
                raise Fault("The requested operation is not supported after starting the microVM.")
            self.told = True
            for key in ("kernel_image_path", "initrd_path", "path_on_host"):
                if key in body:
                    self.file(body[key])
            if path == "/vsock":
                await self.listen(str(body["uds_path"]))
        elif (method, path) == ("PUT", "/actions"):
            if self.state != "new":
                raise Fault("The microVM is started already.")
            self.state = "Running"
            print("guest: up", flush=True)
        elif (method, path) == ("PATCH", "/vm"):
            if self.state not in ("Running", "Paused"):
                raise Fault("The requested operation is not supported before starting the microVM.")
            self.state = {"Paused": "Paused", "Resumed": "Running"}[str(body["state"])]
        elif (method, path) == ("PUT", "/snapshot/create"):
            if self.state != "Paused":
                raise Fault("Cannot create a snapshot of a microVM that is not paused.")
            (self.root / str(body["snapshot_path"]).lstrip("/")).write_bytes(b"devices")
            (self.root / str(body["mem_file_path"]).lstrip("/")).write_bytes(b"m" * 4096)
        elif (method, path) == ("PUT", "/snapshot/load"):
            if self.told or self.state != "new":
                raise Fault("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
            backend = body["mem_backend"]
            assert isinstance(backend, dict) and backend["backend_type"] == "File"
            self.file(backend["backend_path"])
            if self.file(body["snapshot_path"]).read_bytes() != b"devices":
                raise Fault("Cannot deserialize the snapshot.")
            self.state = "Running" if body["resume_vm"] else "Paused"
            await self.listen("/vsock.sock")
        else:
            raise Fault(f"Invalid request method and/or path: {method} {path}.")
        return b""

    async def listen(self, path: str) -> None:
        self.vsock = await asyncio.start_unix_server(self.dial, str(self.root / path.lstrip("/")))

    async def dial(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"CONNECT 1024\n" and self.state == "Running":
            writer.write(b"OK 1073741824\n")
            while part := await reader.read(1024):
                writer.write(part)
                await writer.drain()
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        try:
            said = await self.handle(method, path, body)
            status = "200 OK" if said else "204 No Content"
        except Fault as error:
            said, status = json.dumps({"fault_message": str(error)}).encode(), "400 Bad Request"
        writer.write(f"HTTP/1.1 {status}\r\nServer: fake\r\nContent-Length: {len(said)}\r\n\r\n".encode() + said)
        await writer.drain()
        writer.close()


async def main(arguments: list[str]) -> None:
    own, inner = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = dict(zip(own[::2], own[1::2], strict=False))
    program = Path(options["--exec-file"]).name
    root = Path(options["--chroot-base-dir"]) / program / options["--id"] / "root"
    machine = Machine(root)
    if os.path.exists(root / "disk-slow"):
        await asyncio.sleep(3600)  # never answers
    server = await asyncio.start_unix_server(machine.serve, str(root / inner[inner.index("--api-sock") + 1].lstrip("/")))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
