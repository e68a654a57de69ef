# SPDX-License-Identifier: Apache-2.0
"""Programs compiled once: results of compilers by the content of all that went in, in memory and in files.

What goes in: the source, the files beside it, the language's definition, the digests of the image's layers, the limits, and whether the
member that compiles may have served others. Only what will be the same again is kept: a success, and a refusal by the compiler itself;
never what a limit or the machine did. Requests for the same program wait for the one that compiles it.

A file, `<key>.bin`: magic, format version, SHA-256 of the rest, the rest as MessagePack. One that does not fit is removed and its
program compiled anew. The least recently used go first beyond `max_bytes`; a file's time of change is that of its last use.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path

import msgspec

from opendsec.api.fn import FnResult
from opendsec.api.fn_check import Bounds
from opendsec.edge.fn import outcome
from opendsec.edge.fn.calls import Calls, Target, encode_source
from opendsec.edge.fn.languages import command
from opendsec.edge.log import Log
from opendsec.runtime.fncall.interface import File, Job

MAGIC = b"DSCP"
VERSION = 1
_HEAD = len(MAGIC) + 4 + 32
IN_MEMORY_BYTES = 64 << 20
LARGEST_BYTES = 64 << 20  # of one program; larger ones are not kept


class Compiled(msgspec.Struct, frozen=True):
    """What a compiler said and what it made. `result.outcome` is `ok` or tells why there is nothing to run."""

    result: FnResult
    artifacts: dict[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.artifacts.values())) + len(self.result.stdout.data) + len(self.result.stderr.data) + 512


class Compiler:
    """Compiles, and remembers. `directory` is made if need be."""

    def __init__(self, calls: Calls, directory: Path, max_bytes: int, log: Log) -> None:
        self._calls, self._directory, self._max_bytes, self._log = calls, directory, max_bytes, log
        self._memory: OrderedDict[str, Compiled] = OrderedDict()
        self._memory_bytes = 0
        self._under_way: dict[str, asyncio.Task[Compiled]] = {}
        self._writing = asyncio.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def compile(self, target: Target, source: str, files: Mapping[str, bytes], bounds: Bounds, *, caller: Hashable) -> Compiled:
        """The program, from memory, from disk or from the compiler. Raises what kept it from being compiled."""
        place = self._calls.compile_target(target, bounds)
        spec = place.pool.spec
        resolved = await self._calls.pools.node.images.resolve(spec.image, spec.layers)
        key = _key(place, source, files, tuple(layer.digest for layer in resolved.layers))
        while (running := self._under_way.get(key)) is not None:
            await asyncio.wait((running,))
            if not running.cancelled() and running.exception() is None:
                return running.result()
        known = self._memory.get(key)
        if known is not None:
            self._memory.move_to_end(key)
            return known
        task = self._under_way[key] = asyncio.ensure_future(self._make(key, place, source, files, caller))
        # Before those who wait for it go on: of one that failed the next in line makes another.
        task.add_done_callback(lambda _: self._under_way.pop(key))
        return await task

    async def _make(self, key: str, place: Target, source: str, files: Mapping[str, bytes], caller: Hashable) -> Compiled:
        kept = await asyncio.to_thread(self._load, key)
        if kept is not None:
            self._remember(key, kept)
            return kept
        language = place.language
        assert language is not None
        job = Job(
            kind="exec",
            limits=place.job_limits,
            argv=command(language.compile, language, place.bounds.memory_bytes),
            files=(*(File(name, data) for name, data in files.items()), File(language.file, encode_source(source))),
            outputs=language.artifacts,
            env=language.env,
        )
        result = await self._calls.run(place, job, caller=caller)
        compiled = _judge(result, language.artifacts)
        refusal = compiled.result.outcome == "compile_error" and not compiled.result.limits_hit and compiled.result.signal is None
        if compiled.result.outcome == "ok" or refusal:
            self._remember(key, compiled)
            if compiled.size <= LARGEST_BYTES:
                async with self._writing:
                    await asyncio.to_thread(self._store, key, compiled)
        return compiled

    def _remember(self, key: str, compiled: Compiled) -> None:
        if (before := self._memory.pop(key, None)) is not None:
            self._memory_bytes -= before.size
        self._memory[key] = compiled
        self._memory_bytes += compiled.size
        while self._memory_bytes > IN_MEMORY_BYTES:
            self._memory_bytes -= self._memory.popitem(last=False)[1].size

    # --- files; in a worker thread ------------------------------------------------------------------------------------------

    def _load(self, key: str) -> Compiled | None:
        path = self._directory / f"{key}.bin"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            head, body = data[:_HEAD], data[_HEAD:]
            if head[:4] != MAGIC or int.from_bytes(head[4:8], "little") != VERSION or hashlib.sha256(body).digest() != head[8:]:
                raise ValueError("its head does not fit")
            result, artifacts = msgspec.msgpack.decode(body, type=tuple[bytes, dict[str, bytes]])
            compiled = Compiled(msgspec.json.decode(result, type=FnResult), artifacts)
            os.utime(path)
        except (ValueError, OSError) as error:
            self._log.warning("fn.compiled_damaged", file=path.name, reason=str(error))
            path.unlink(missing_ok=True)
            return None
        return compiled

    def _store(self, key: str, compiled: Compiled) -> None:
        # The result as JSON: its value is some, as it came.
        body = msgspec.msgpack.encode((msgspec.json.encode(compiled.result), compiled.artifacts))
        temporary = self._directory / f".{key}.{secrets.token_hex(4)}"
        try:
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(MAGIC + VERSION.to_bytes(4, "little") + hashlib.sha256(body).digest() + body)
            os.rename(temporary, self._directory / f"{key}.bin")
            self._trim()
        except OSError as error:  # it is a cache
            self._log.warning("fn.compiled_not_kept", reason=str(error))
            temporary.unlink(missing_ok=True)

    def _trim(self) -> None:
        entries = [(entry.stat(), entry.path) for entry in os.scandir(self._directory)]
        total = sum(stat.st_size for stat, _ in entries)
        for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
            if total <= self._max_bytes:
                return
            os.unlink(path)
            total -= stat.st_size


def _key(place: Target, source: str, files: Mapping[str, bytes], layers: tuple[str, ...]) -> str:
    # Who wants members that served nobody wants no program from one that did.
    alone = place.fresh or place.pool.spec.reuse == "never"
    digest = hashlib.sha256(msgspec.json.encode((place.language, layers, place.bounds, place.pool.spec.user, alone)))
    for name, data in sorted([("", encode_source(source)), *files.items()]):
        digest.update(b"%d:%d:" % (len(name.encode()), len(data)) + name.encode() + data)
    return digest.hexdigest()


def _judge(result: FnResult, wanted: tuple[str, ...]) -> Compiled:
    """What a compiler's end means: it refused the program, or was ended for what the program made it do, or the machine failed."""
    artifacts = result.files
    bare = msgspec.structs.replace(result, files={}, index=0, cold=False)
    incomplete = outcome.INCOMPLETE in result.message
    if result.outcome == "ok" and artifacts and not incomplete:
        return Compiled(bare, artifacts)
    if result.outcome in ("platform_error", "cancelled"):
        return Compiled(bare, {})
    message = result.message
    if result.outcome == "ok" and incomplete:
        message = f"what the compiler made is too much: {message}"
    elif result.outcome == "ok":
        message = f"the compiler ended well but left no {' or '.join(wanted)}" + (f"; {message}" if message else "")
    elif result.outcome != "runtime_error":
        message = f"the compiler was ended ({result.outcome}): {message}"
    return Compiled(msgspec.structs.replace(bare, outcome="compile_error", message=message), {})


def refused(compiled: Compiled, index: int = 0) -> FnResult:
    """The result of a call whose program could not be compiled."""
    message = compiled.result.message or "the compiler refused it"
    return FnResult(outcome=compiled.result.outcome, index=index, message=message, compile=compiled.result)
