# SPDX-License-Identifier: Apache-2.0
"""Object stores and web servers, through obstore: S3, GCS, Azure, HTTP(S), and one in memory for tests.

Its asynchronous half is not used: it calls back into Python from threads of its own, also while the interpreter shuts down, which then
aborts (obstore 0.12, one exit in five). Blocking calls in our threads (`threads`) do not.

obstore's own retries are off: `retry.Patient` does them the same way for all stores. Its errors quote addresses with the passwords in
them, and what the server said; only their class, a status number and a few words of ours get out of here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from opendsec.images.origins import is_key
from opendsec.images.remote.store import Kind, StoreError, ignore
from opendsec.images.remote.threads import Abandoned, Workers

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

T = TypeVar("T")
Bytes = TypeVar("Bytes", bytes, memoryview)

_STATUS = re.compile(r"status code: (\d{3})")
_THREADS = 32
_LONGEST_S = 900.0
_PART_BYTES = 8 << 20
_MAX_WHOLE = 1 << 30  # what is put in one piece is held in memory
_PARTS = 5000  # S3 takes 10,000
_MAX_KEYS = 1_000_000


class BadOptions(Exception):
    """The options or the address are not such as the store takes. Says nothing of their values."""


def connect(url: str, options: Mapping[str, str], *, attempt_s: float, ca: bytes = b"") -> Backend:
    """Nothing is sent yet. `ca`: certificates (PEM) that are trusted besides the usual ones. Raises BadOptions."""
    # Here, because loading it takes 0.1 s and an edge without remote stores needs none of it.
    import obstore.exceptions
    import obstore.store

    client: dict[str, object] = {
        # A large answer may take long; one that stands still may not. Who waits has a deadline of its own.
        "read_timeout": timedelta(seconds=attempt_s),
        "timeout": timedelta(seconds=max(_LONGEST_S, attempt_s)),
        "connect_timeout": timedelta(seconds=min(attempt_s, 5.0)),
        "user_agent": "opendsec",
        "allow_http": url.startswith("http://") or options.get("endpoint", "").startswith("http://"),
    }
    if ca:
        client["root_certificate"] = ca
    options = dict(options)
    if url.startswith(("http://", "https://")):
        authorization = options.pop("authorization", None)
        if options:
            raise BadOptions("a web server takes only the option 'authorization'")
        if authorization is not None:
            client["default_headers"] = {"authorization": authorization}
    try:
        return obstore.store.from_url(url, client_options=client, retry_config={"max_retries": 0}, config=options or None)  # type: ignore[call-overload, no-any-return]
    except obstore.exceptions.UnknownConfigurationKeyError:
        why = "there is an option that this kind of store does not know"
    except Exception as error:
        why = f"the store cannot be set up with these ({type(error).__name__})"
    raise BadOptions(why)  # outside of the handler: the original has the values in it


class ObjectStore:
    """See `store.RemoteStore`. Bounded in time only inside `retry.Patient`, as `config.open_store` makes it."""

    def __init__(self, name: str, backend: Backend, *, writable: bool = False, multipart: bool = True) -> None:
        self.name, self.writable = name, writable
        self._backend, self._multipart = backend, multipart
        self._workers = Workers(f"store {name}", _THREADS)

    async def get(self, key: str, *, limit: int) -> bytes:
        import obstore

        def work(abandoned: Abandoned) -> bytes:
            answer = obstore.get(self._backend, key)
            size = answer.meta["size"]
            if size > limit:
                raise StoreError("damaged", self.name, key, f"has {size} bytes, more than the {limit} such an object may have")
            return _exactly(self.name, key, bytes(answer.bytes()), size)

        return await self._run(key, work)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        import obstore

        def work(abandoned: Abandoned) -> memoryview:
            return _exactly(self.name, key, memoryview(obstore.get_range(self._backend, key, start=start, length=length)), length)

        return await self._run(key, work)

    async def put(self, key: str, content: bytes | Path, *, progress: Callable[[int], None] = ignore) -> None:
        import obstore

        def work(abandoned: Abandoned) -> None:
            if isinstance(content, bytes):
                obstore.put(self._backend, key, content, use_multipart=False)
                progress(len(content))
                return
            size = content.stat().st_size
            if not self._multipart and size > _MAX_WHOLE:
                raise StoreError("denied", self.name, key, f"a web server takes at most {_MAX_WHOLE >> 20} MiB at once from here")
            if not self._multipart or size <= _PART_BYTES:
                obstore.put(self._backend, key, content.read_bytes(), use_multipart=False)
                progress(size)
                return
            part = max(_PART_BYTES, -(-size // _PARTS))
            blocks = _blocks(content, part, progress, abandoned)
            obstore.put(self._backend, key, blocks, use_multipart=True, chunk_size=part, max_concurrency=4)

        self._check_writable(key)
        await self._run(key, work)

    async def size(self, key: str) -> int:
        import obstore

        def work(abandoned: Abandoned) -> int:
            return int(obstore.head(self._backend, key)["size"])

        return await self._run(key, work)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        import obstore

        def work(abandoned: Abandoned) -> list[str]:
            found: list[str] = []
            for page in obstore.list(self._backend, prefix=prefix):
                found += [entry["path"] for entry in page]
                if len(found) > _MAX_KEYS:
                    raise StoreError("damaged", self.name, prefix, f"lists more than {_MAX_KEYS} objects")
            return found

        for key in await self._run(prefix, work):
            if is_key(key):
                yield key

    async def delete(self, key: str) -> None:
        import obstore

        def work(abandoned: Abandoned) -> None:
            obstore.delete(self._backend, key)

        self._check_writable(key)
        try:
            await self._run(key, work)
        except StoreError as error:
            if error.kind != "missing":
                raise

    async def close(self) -> None:
        self._workers.close()

    def _check_writable(self, key: str) -> None:
        if not self.writable:
            raise StoreError("denied", self.name, key, "it is not configured as writable")

    async def _run(self, key: str, work: Callable[[Abandoned], T]) -> T:
        if not is_key(key):
            raise StoreError("missing", self.name, "", "that is no key")
        try:
            return await self._workers.run(work)
        except StoreError:
            raise
        except Exception as error:
            kind, why = _explain(error)
        raise StoreError(kind, self.name, key, why)


def _exactly(store: str, key: str, data: Bytes, length: int) -> Bytes:
    if len(data) != length:
        raise StoreError("damaged", store, key, f"the answer has {len(data)} bytes instead of {length}")
    return data


def _explain(error: Exception) -> tuple[Kind, str]:
    import obstore.exceptions as known

    if isinstance(error, FileNotFoundError | known.NotFoundError):
        return "missing", "there is no such object"
    if isinstance(error, PermissionError | known.PermissionDeniedError):
        return "denied", "it refuses us (403)"
    if isinstance(error, known.UnauthenticatedError):
        return "denied", "it does not take our credentials (401)"
    text = str(error)
    if "RangeNotSupported" in text:
        return "damaged", "the server does not serve ranges"
    if isinstance(error, NotImplementedError | known.NotSupportedError):
        return "denied", "the store cannot do this"
    if "Invalid range" in text:
        return "damaged", "the object has not that many bytes"
    if "UnexpectedRange" in text:
        return "damaged", "the answer is not the range that was asked for"
    if found := _STATUS.search(text):
        status = int(found[1])
        if status == 416:
            return "damaged", "the object has not that many bytes (416)"
        if status == 507:
            return "full", "no space left (507)"
        if status in (405, 501):
            return "denied", f"the store cannot do this ({status})"
        return "unreachable", f"it answered with status {status}"
    if "Interrupted" in text:
        return "unreachable", "the answer was cut short"
    if "Timeout" in text or "timed out" in text:
        return "unreachable", "no answer in time"
    return "unreachable", f"it cannot be reached ({type(error).__name__})"


def _blocks(path: Path, size: int, progress: Callable[[int], None], abandoned: Abandoned) -> Iterator[bytes]:
    done = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(size):
            if abandoned.is_set():
                raise InterruptedError  # the upload is aborted
            yield block
            done += len(block)
            progress(done)
