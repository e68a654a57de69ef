# SPDX-License-Identifier: Apache-2.0
"""This terminal joined to a command in a sandbox: its output here, our input and signals there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opendsec.api.errors import OpenDSecError, Unavailable
from opendsec.api.exec import Pty
from opendsec.client._core import CommandOptions
from opendsec.client.aio import Process, Sandbox
from opendsec.client.results import Result

INPUT_BYTES = 64 << 10


async def joined(
    box: Sandbox, command: str | Sequence[str], options: CommandOptions, *, interactive: bool, terminal: bool
) -> tuple[Result, int]:
    """Run a command with its output on ours as it comes. How it ended, and how many bytes of its output were lost on the way.

    Ctrl-C, SIGTERM and the end of our terminal go to the command; a second Ctrl-C kills it. `interactive` passes on our input.
    `terminal` gives the command a terminal of its own and makes ours transparent to it: then Ctrl-C, Ctrl-Z and the like are characters
    that its terminal turns into signals.
    """
    raw = terminal and interactive and os.isatty(0)
    if terminal:
        options["pty"] = _size() if os.isatty(1) or os.isatty(0) else Pty()
    process = await box.start(command, stdin_stream=interactive, **options)
    with _forwarded_signals(process, resize=terminal and os.isatty(1)), _raw_terminal() if raw else _nothing():
        if interactive:
            _pump_input(process)
        return await _show(process)


async def _show(process: Process) -> tuple[Result, int]:
    lost = 0
    try:
        async for event in process.attach(hold=True):
            if event.data:
                _write(2 if event.stream == "stderr" else 1, event.data)
            elif event.kind == "gap":
                lost += event.missing_bytes
            elif event.result is not None:
                return event.result, lost
    except OSError:  # nobody reads our output, and the command would be told by SIGPIPE; or it cannot be written
        await process.kill()
        raise
    raise Unavailable("the command's output ended before the command did")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _pump_input(process: Process) -> None:
    """Pass on our input from a thread: it may be a file, a pipe or a terminal, and reading it must not stop the output."""
    loop = asyncio.get_running_loop()

    def pump() -> None:
        try:
            while data := os.read(0, INPUT_BYTES):
                asyncio.run_coroutine_threadsafe(process.write(data), loop).result()
            asyncio.run_coroutine_threadsafe(process.close_stdin(), loop).result()
        except (OSError, OpenDSecError, RuntimeError, asyncio.CancelledError):
            pass  # the command ended first, or closed its input

    # A daemon: it may be blocked in a read that never ends when the command is over.
    threading.Thread(target=pump, daemon=True, name="stdin").start()


def _size() -> Pty:
    for fd in (1, 0, 2):
        try:
            cols, rows = os.get_terminal_size(fd)
        except OSError:
            continue
        if rows and cols:
            return Pty(rows=rows, cols=cols)
    return Pty()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Our terminal passes every key on, and is what it was afterwards."""
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stdout.flush()


@contextmanager
def _forwarded_signals(process: Process, *, resize: bool) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[object]] = set()
    interrupts = 0

    def spawn(work: object) -> None:
        assert asyncio.iscoroutine(work)
        task = loop.create_task(_quietly(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        spawn(process.kill() if interrupts > 1 else process.signal(signal.SIGINT, tree=True))

    def pass_on(number: int) -> None:
        spawn(process.signal(number, tree=True))

    def resized() -> None:
        size = _size()
        spawn(process.resize(size.rows, size.cols))

    loop.add_signal_handler(signal.SIGINT, interrupt)
    passed_on = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else nohup(1) wants us to go on
        passed_on.append(signal.SIGHUP)
    for number in passed_on:
        loop.add_signal_handler(number, pass_on, number)
    if resize:
        loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGWINCH, *passed_on):
            loop.remove_signal_handler(number)


async def _quietly(work: object) -> None:
    assert asyncio.iscoroutine(work)
    try:
        await work
    except OpenDSecError:
        pass  # it ended meanwhile
