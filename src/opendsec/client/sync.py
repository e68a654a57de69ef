# SPDX-License-Identifier: Apache-2.0
"""The SDK without an event loop: every class of `aio.py`, the same methods, blocking; asynchronous iterators are plain ones here.

There is no second copy of the logic. Each class holds its asynchronous twin, and each method runs the twin's on one private event
loop in a thread of its own. `blocking` and `iterating` keep the twin's signature, so type checkers and `help()` show it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

from opendsec.api.errors import OpenDSecError
from opendsec.api.fn import FnCall
from opendsec.api.sandboxes import SandboxInfo
from opendsec.client import aio
from opendsec.client.batch import Input, Inputs
from opendsec.client.results import FnResult
from opendsec.client.transport import Transport

__all__ = ["Client", "Files", "Images", "Keyboard", "Mouse", "Pools", "Process", "Sandbox", "Screen", "Session", "Snapshots"]

_TAKEN_AT_ONCE = 32  # inputs of a batch from the caller's iterator
_TAKING_S = 0.002  # and how long to wait for more of them

A = TypeVar("A")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")


class _Loop:
    """An event loop in a thread of its own, started with its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[None, None, R]) -> R:
        """The result of `work`, done there. An interrupt here cancels it there."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="opendsec-client", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_finish(loop), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Leave nothing behind in a loop that is about to close, as asyncio.run does."""
    others = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


class _Mirror(Generic[A]):
    """Holds an asynchronous object, and the loop on which it lives."""

    def __init__(self, twin: A, loop: _Loop) -> None:
        self._twin = twin
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._twin)


def blocking(method: Callable[Concatenate[A, P], Coroutine[None, None, R]]) -> Callable[Concatenate[_Mirror[A], P], R]:
    """`method` of the twin, waited for."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.run(method(self._twin, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[_Mirror[A], P], Generator[R, None, None]]:
    """`method` of the twin, an asynchronous iterator, as a plain one. Closing it closes the twin's."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        source = method(self._twin, *args, **kwargs)

        async def following() -> tuple[R] | None:
            try:
                return (await anext(source),)
            except StopAsyncIteration:
                return None

        def iterate() -> Generator[R, None, None]:
            try:
                while (item := self._loop.run(following())) is not None:
                    yield item[0]
            finally:
                self._loop.run(_close(source))

        return iterate()

    functools.update_wrapper(call, method)
    return call


def wrapping(
    method: Callable[Concatenate[A, P], Coroutine[None, None, R]], wrap: Callable[[R, _Loop], S]
) -> Callable[Concatenate[_Mirror[A], P], S]:
    """`method` of the twin, waited for; what it hands out is mirrored in turn."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> S:
        return wrap(self._loop.run(method(self._twin, *args, **kwargs)), self._loop)

    functools.update_wrapper(call, method)
    return call


async def _close(source: AsyncGenerator[R, None]) -> None:
    await source.aclose()


class Files(_Mirror[aio.Files]):
    """See `opendsec.client.files.Files`."""

    read = blocking(aio.Files.read)
    read_bytes = blocking(aio.Files.read_bytes)
    chunks = iterating(aio.Files.chunks)
    write = blocking(aio.Files.write)
    append = blocking(aio.Files.append)
    list = blocking(aio.Files.list)
    stat = blocking(aio.Files.stat)
    exists = blocking(aio.Files.exists)
    mkdir = blocking(aio.Files.mkdir)
    move = blocking(aio.Files.move)
    remove = blocking(aio.Files.remove)
    chmod = blocking(aio.Files.chmod)
    watch = iterating(aio.Files.watch)
    upload = blocking(aio.Files.upload)
    download = blocking(aio.Files.download)
    archive = iterating(aio.Files.archive)


class Images(_Mirror[aio.Images]):
    """See `opendsec.client.images.Images`."""

    list = blocking(aio.Images.list)
    inspect = blocking(aio.Images.inspect)
    diff = blocking(aio.Images.diff)
    lint = blocking(aio.Images.lint)
    verify = blocking(aio.Images.verify)
    stores = blocking(aio.Images.stores)
    build = blocking(aio.Images.build)
    build_events = iterating(aio.Images.build_events)
    compose = blocking(aio.Images.compose)
    pull = blocking(aio.Images.pull)
    push = blocking(aio.Images.push)
    warm = blocking(aio.Images.warm)
    trace = blocking(aio.Images.trace)
    remove = blocking(aio.Images.remove)
    gc = blocking(aio.Images.gc)


class Pools(_Mirror[aio.Pools]):
    """See `opendsec.client.fn.Pools`."""

    list = blocking(aio.Pools.list)
    set = blocking(aio.Pools.set)
    resize = blocking(aio.Pools.resize)
    remove = blocking(aio.Pools.remove)


class Snapshots(_Mirror[aio.Snapshots]):
    """See `opendsec.client.snapshots.Snapshots`."""

    list = blocking(aio.Snapshots.list)
    get = blocking(aio.Snapshots.get)
    remove = blocking(aio.Snapshots.remove)


class Screen(_Mirror[aio.Screen]):
    """See `opendsec.client.screen.Screen`."""

    png = blocking(aio.Screen.png)
    size = blocking(aio.Screen.size)
    resize = blocking(aio.Screen.resize)


class Mouse(_Mirror[aio.Mouse]):
    """See `opendsec.client.screen.Mouse`."""

    move = blocking(aio.Mouse.move)
    click = blocking(aio.Mouse.click)
    down = blocking(aio.Mouse.down)
    up = blocking(aio.Mouse.up)
    scroll = blocking(aio.Mouse.scroll)


class Keyboard(_Mirror[aio.Keyboard]):
    """See `opendsec.client.screen.Keyboard`."""

    press = blocking(aio.Keyboard.press)
    type = blocking(aio.Keyboard.type)


class Process(_Mirror[aio.Process]):
    """See `opendsec.client.processes.Process`."""

    @property
    def id(self) -> str:
        return self._twin.id

    info = blocking(aio.Process.info)
    wait = blocking(aio.Process.wait)
    attach = iterating(aio.Process.attach)
    write = blocking(aio.Process.write)
    close_stdin = blocking(aio.Process.close_stdin)
    signal = blocking(aio.Process.signal)
    resize = blocking(aio.Process.resize)
    kill = blocking(aio.Process.kill)


class Session(_Mirror[aio.Session]):
    """See `opendsec.client.processes.Session`."""

    @property
    def id(self) -> str:
        return self._twin.id

    info = blocking(aio.Session.info)
    run = blocking(aio.Session.run)
    close = blocking(aio.Session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._twin.__aexit__(kind, error, trace))


class Sandbox(_Mirror[aio.Sandbox]):
    """See `opendsec.client.aio.Sandbox`. As `with box:` it is killed at the end."""

    def __init__(self, twin: aio.Sandbox, loop: _Loop) -> None:
        super().__init__(twin, loop)
        self.files = Files(twin.files, loop)
        self.screen, self.mouse, self.keyboard = Screen(twin.screen, loop), Mouse(twin.mouse, loop), Keyboard(twin.keyboard, loop)

    @property
    def id(self) -> str:
        return self._twin.id

    @property
    def info(self) -> SandboxInfo | None:
        return self._twin.info

    refresh = blocking(aio.Sandbox.refresh)
    usage = blocking(aio.Sandbox.usage)
    kill = blocking(aio.Sandbox.kill)
    pause = blocking(aio.Sandbox.pause)
    resume = blocking(aio.Sandbox.resume)
    fork = wrapping(aio.Sandbox.fork, lambda slots, loop: _slots(slots, loop))
    snapshot = blocking(aio.Sandbox.snapshot)
    pack = blocking(aio.Sandbox.pack)
    run = blocking(aio.Sandbox.run)
    stream = iterating(aio.Sandbox.stream)
    start = wrapping(aio.Sandbox.start, Process)
    processes = blocking(aio.Sandbox.processes)
    session = wrapping(aio.Sandbox.session, Session)

    def process(self, process_id: str) -> Process:
        """A command that was started before, by its id; no I/O."""
        return Process(self._twin.process(process_id), self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._twin.__aexit__(kind, error, trace))


def _slots(slots: list[aio.Sandbox | OpenDSecError], loop: _Loop) -> list[Sandbox | OpenDSecError]:
    return [slot if isinstance(slot, OpenDSecError) else Sandbox(slot, loop) for slot in slots]


def _sandboxes(boxes: list[aio.Sandbox], loop: _Loop) -> list[Sandbox]:
    return [Sandbox(box, loop) for box in boxes]


class Client(_Mirror[aio.Client]):
    """See `opendsec.client.aio.Client`. Use it as `with Client() as client:`, or call `close()` at the end."""

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        start_edge: bool = True,
        retry: aio.RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        twin = aio.Client(
            address, token=token, run_dir=run_dir, state_dir=state_dir, start_edge=start_edge, retry=retry, transport=transport
        )
        super().__init__(twin, _Loop())
        self.images = Images(twin.images, self._loop)
        self.pools = Pools(twin.pools, self._loop)
        self.snapshots = Snapshots(twin.snapshots, self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; may be repeated."""
        try:
            self._loop.run(self._twin.aclose())
        finally:
            self._loop.close()

    create = wrapping(aio.Client.create, Sandbox)
    create_many = wrapping(aio.Client.create_many, _slots)
    get = wrapping(aio.Client.get, Sandbox)
    list = wrapping(aio.Client.list, _sandboxes)
    call = blocking(aio.Client.call)
    judge = blocking(aio.Client.judge)
    languages = blocking(aio.Client.languages)
    map_lists = iterating(aio.Client.map_lists)
    info = blocking(aio.Client.info)
    capabilities = blocking(aio.Client.capabilities)
    events = iterating(aio.Client.events)
    drain = blocking(aio.Client.drain)
    shutdown = blocking(aio.Client.shutdown)

    def map(self, call: FnCall, inputs: Inputs, *, window: int = 64) -> Generator[FnResult, None, None]:
        """As `opendsec.client.aio.Client.map`. `inputs` is iterated over in another thread, so it may block, and may use this client."""
        source = inputs
        if isinstance(inputs, Iterable) and not isinstance(inputs, (list, tuple, range, str, bytes, dict)):
            source = _threaded(iter(inputs))
        lists = self.map_lists(call, source, window=window)
        try:
            for results in lists:
                yield from results
        finally:
            lists.close()

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id, without asking whether it exists: the first call on it tells."""
        return Sandbox(self._twin.sandbox(sandbox_id), self._loop)


async def _threaded(inputs: Iterator[Input]) -> AsyncGenerator[Input, None]:
    """A plain iterator that may block, as an asynchronous one. What is quickly there comes in one step."""

    def take() -> tuple[list[Input], BaseException | None, bool]:
        items: list[Input] = []
        until = time.monotonic() + _TAKING_S
        try:
            for item in inputs:
                items.append(item)
                if len(items) >= _TAKEN_AT_ONCE or time.monotonic() > until:
                    return items, None, False
        except Exception as error:
            return items, error, True
        return items, None, True

    ended = False
    while not ended:
        items, error, ended = await asyncio.to_thread(take)
        for item in items:
            yield item
        if error is not None:
            raise error
