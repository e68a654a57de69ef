# SPDX-License-Identifier: Apache-2.0
"""A session: a shell of a sandbox that keeps its directory, variables, functions and background jobs between commands.

How commands reach the shell and how their ends come back is in `shell.py`. Each command is a `Process` of the sandbox's table, so it is
listed, waited for, attached to and signalled like any other; its standard input is /dev/null.

* One command at a time: a second one is refused (Conflict), because what it would see depends on when the first one ends.
* Output. What the shell and its children write between two commands comes from background jobs; it is shown at the start of the next.
* A time-out, an output limit or a kill ends what the command has started, not the shell and not the jobs of earlier commands: processes
  that were there when it began are spared. The shell is told to give up the rest of the command's text. Both are repeated until it
  answers; if it does not answer in time (it waits by itself, or its trap was taken away), it is killed and the session closes.
* The shell's end closes the session: after `exit 3`, `exec program`, a failure under `set -e`, or a kill. The command under way gets that
  exit code. Jobs in the background live on, as after leaving any shell, until the session is closed by a caller, which kills them.
* A shell that says something impossible (its channel was written to by a command) is killed.
* Signals sent to a command in a session reach all processes that it has started; the shell gets none.
"""

from __future__ import annotations

import asyncio
from signal import SIGKILL, SIGSTOP

from opendsec.api.errors import InvalidRequest, SandboxLost, Unavailable, Unsupported
from opendsec.api.exec import SessionInfo
from opendsec.edge import shell
from opendsec.edge.capture import Capture
from opendsec.edge.process import Process
from opendsec.edge.processes import ProcessTable
from opendsec.edge.streams import Reader, Writer
from opendsec.edge.timing import Timer
from opendsec.runtime.backend import Exit, Running

READY_S = 30.0  # for a new shell to say that it is there
ANSWER_S = 2.0  # for a shell to come back once the children of its command were killed
AGAIN_S = 0.05  # between two rounds of killing in that time
MUTE_S = 0.2  # from the end of a shell's answers to that of its reading
BETWEEN_BYTES = 64 << 10  # kept of each stream between commands


class Session:
    """One shell. As a `Control` it stands for the processes of the command under way."""

    def __init__(self, table: ProcessTable, session_id: str) -> None:
        self.id = session_id
        self.closed = ""  # why it is
        self.process: Process | None = None  # the command under way
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: Running | None = None
        self._table = table
        self._clock = table.clock
        self._between = (Capture(BETWEEN_BYTES), Capture(BETWEEN_BYTES))
        self._number = 0
        self._statuses = shell.StatusReader()
        self._outputs: tuple[Reader, ...] = ()
        self._status: Reader | None = None
        self._commands: Writer | None = None
        self._timer: Timer | None = None
        self._mute: Timer | None = None
        self._answer_by = 0.0
        self._released = False

    # --- start -----------------------------------------------------------------------------------------------------

    def connect(self, running: Running, stdout: int, stderr: int, commands: int, status: int) -> None:
        """It has been executed, or could not be. The descriptors are ours from now on."""
        poller = self._table.execution.poller
        self.running = running
        self._table.shells += 1
        self._commands = Writer(poller, commands, terminal=False)
        self._outputs = (Reader(poller, stdout, self._feed_stdout, _nothing), Reader(poller, stderr, self._feed_stderr, _nothing))
        self._status = Reader(poller, status, self._feed_status, self._on_mute)
        self._timer = self._clock.call_later(READY_S, self._on_not_ready)
        running.exited.add_done_callback(self._on_exit)

    def _on_not_ready(self) -> None:
        self._fail(Unsupported(f"sessions need bash in the image, and what runs under that name did not answer within {READY_S:g} s"))
        self.kill("it did not become ready")

    def _fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    # --- a command -------------------------------------------------------------------------------------------------

    def begin(self, process: Process, text: str) -> None:
        """Hand a command to the shell."""
        assert self.running is not None and self._commands is not None
        self.process = process
        self._number += 1
        self.running.mark()  # what is there now is spared
        for between, output in zip(self._between, (process.stdout, process.stderr), strict=True):
            kept = between.snapshot()
            output.write(memoryview(kept.head + kept.tail))
            if kept.omitted_bytes:
                process.note = f"of what background jobs wrote before it, {kept.omitted_bytes} bytes were not kept"
        if process.output_limit is not None:  # which is for its own output
            process.output_limit += process.stdout.total + process.stderr.total
        self._between = (Capture(BETWEEN_BYTES), Capture(BETWEEN_BYTES))
        process.started(self)
        self._commands.put(shell.command_frame(self._number, text))

    def _feed_stdout(self, data: memoryview) -> None:
        if self.process is not None:
            self.process.feed_stdout(data)
        else:
            self._between[0].write(data)

    def _feed_stderr(self, data: memoryview) -> None:
        if self.process is not None:
            self.process.feed_stderr(data)
        else:
            self._between[1].write(data)

    def _feed_status(self, data: memoryview) -> None:
        if self.closed:
            return
        try:
            for status in self._statuses.feed(bytes(data)):
                self._on_status(status)
        except ValueError:
            self.kill("its shell said something that makes no sense: a command wrote to the shell's own channel")

    def _on_status(self, status: shell.Status) -> None:
        if status.number != self._number or (self.process is None and self.ready.done()):
            raise ValueError("not the command under way")
        self._stop_timer()
        if not self.ready.done():
            self.ready.set_result(None)
            return
        process = self.process
        assert process is not None
        if process.cause is None:
            self._end(process, Exit(code=status.code))
        else:  # the code is only that of the interruption
            process.cause_message += "; the session goes on"
            self._end(process, Exit())

    def _on_mute(self) -> None:
        """Its channel is closed: by its end or by `exec`, which close the other channel too, but not in the same moment; or by a command
        that meddled, and then the shell would read commands and never answer."""
        self._mute = self._clock.call_later(MUTE_S, self._on_still_mute)

    def _on_still_mute(self) -> None:
        if self._commands is not None and self._commands.has_reader():
            self.kill("a command closed the shell's own channel")

    def _end(self, process: Process, exit: Exit) -> None:
        """What it has written is in the pipes: take it, and cut."""
        for output in self._outputs:
            output.drain()
        self.process = None
        if not process.ended:
            self._table.on_exit(process, exit)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- Control: the processes of the command under way -----------------------------------------------------------

    def signal(self, number: int, *, tree: bool = False) -> None:
        """To all that the command has started."""
        assert self.running is not None
        if number == SIGKILL:  # first: or a parent sees its child die, and goes on until it dies itself
            self.running.signal(SIGSTOP, tree=True, since_mark=True)
        self.running.signal(number, tree=True, since_mark=True)

    def kill_tree(self) -> None:
        """What the command has started, now and again until the shell answers or its time is up."""
        if self._timer is None and self.process is not None:
            self._answer_by = self._clock.monotonic() + ANSWER_S
            self._round()

    def _round(self) -> None:
        self._timer = None
        if self.process is None:
            return
        if self._clock.monotonic() < self._answer_by:
            if self.running is not None:
                self.running.signal(shell.ABANDON)  # first: or it would go on with the next command
            self.signal(SIGKILL)
            self._timer = self._clock.call_later(AGAIN_S, self._round)
            return
        self.process.cause_message += "; its shell did not answer then and was killed, which closed the session"
        self.kill(f"its shell did not answer within {ANSWER_S:g} s after a command's processes were killed")

    def alive_children(self) -> bool:
        return False

    async def release(self) -> None:
        """The shell is released at its own end."""

    # --- end -------------------------------------------------------------------------------------------------------

    def kill(self, message: str) -> None:
        """Kill the shell and what the command under way has started; jobs of earlier commands go on."""
        if self.running is None or self.closed:
            return
        self._close(message)
        if self.process is not None and self.process.cause is None:
            self.process.cause, self.process.cause_message = "killed", f"the session was closed: {message}"
        self.signal(SIGKILL)
        self.running.signal(SIGKILL)

    def kill_all(self, message: str) -> None:
        """Kill the shell and all its jobs."""
        self._close(message)
        if self.running is not None:
            if self.process is not None and self.process.cause is None:
                self.process.cause, self.process.cause_message = "killed", f"the session was closed: {message}"
            self.running.kill_tree()

    def _close(self, message: str) -> None:
        self.closed = self.closed or message
        self._stop_timer()

    def _on_exit(self, exited: asyncio.Future[Exit]) -> None:
        exit = exited.result()
        assert self.running is not None
        self._table.shells -= 1
        if self._status is not None and not self.closed:
            self._status.drain()  # it may have answered right before
        if exit.not_started:
            self._fail(_refusal(exit.not_started))
        elif exit.lost:
            self._fail(Unavailable("the spawner died while the session was opened"))
        else:
            self._fail(Unsupported("sessions need bash in the image, and what runs under that name ended at once"))
        self._close(_farewell(exit))
        process = self.process
        if process is not None:
            if process.cause is not None:
                self._finish_off()
            else:
                process.note = "the shell ended with it, which closed the session"
            self._end(process, Exit(code=exit.code, signal=exit.signal, lost=exit.lost))
        self.disconnect()
        self._release()

    def _finish_off(self) -> None:
        """The command was to be killed, and no shell starts anything for it any more; its own processes may."""
        assert self.running is not None
        self.running.kill_since_mark()

    def _release(self) -> None:
        if self.running is not None and not self._released:
            self._released = True
            self._table.execution.spawn(self.running.release())

    def disconnect(self) -> None:
        """Let go of the shell's channels. Its output stays open for jobs that live on, and is thrown away."""
        self._stop_timer()
        if self._mute is not None:
            self._mute.cancel()
        if self._commands is not None:
            self._commands.close("the session is closed")
        if self._status is not None:
            self._status.close()

    def abandon(self, message: str) -> None:
        """Nothing more will be heard of it. The command under way is the table's to settle."""
        self._close(message)
        self._fail(SandboxLost(f"the session was not opened: {message}"))
        self.process = None
        self.disconnect()
        for output in self._outputs:
            output.close()

    @property
    def lingers(self) -> bool:
        """Jobs that live on hold its output open."""
        return any(output.open for output in self._outputs)

    def info(self) -> SessionInfo:
        return SessionInfo(
            id=self.id,
            sandbox_id=self._table.sandbox_id,
            state="closed" if self.closed else "busy" if self.process is not None else "open",
            message=self.closed,
        )


def _nothing() -> None:
    """At the end of a stream of the shell: its exit says more."""


def _refusal(message: str) -> Exception:
    """Why bash could not be executed, as the error of whose fault it is."""
    if "working directory" in message:
        return InvalidRequest(message, field="cwd")
    if message.startswith(("no user", "no group", "no such user")):
        return InvalidRequest(message, field="user")
    if message.startswith("cannot execute"):
        return Unsupported(f"sessions need bash in the image: {message}")
    return Unavailable(f"the session's shell could not be started: {message}")


def _farewell(exit: Exit) -> str:
    if exit.lost:
        return "the edge lost its shell"
    if exit.signal is not None:
        return f"its shell was killed by signal {exit.signal}"
    return f"its shell ended with exit code {exit.code}"
