# SPDX-License-Identifier: Apache-2.0
"""OCI layers into one layer of ours. Three processes, so that no one has to be trusted with more than it needs:

    decompressor   confined   blob → tar
    we             root       sums what comes out and counts it; whatever the decompressor was made to do, what is not the layer that
                              its diff_id names is thrown away
    converter      confined   tar → tree in memory → metadata and data file, by two descriptors

The converter asks us what the lower layers have (`nodes.LayerTree.questions`) and tells us at the end what it left out.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal, InvalidRequest, Unavailable
from opendsec.images.layers import DATA, META
from opendsec.images.oci import confine, decompress
from opendsec.images.oci.erofs_image import Blob, write_metadata
from opendsec.images.oci.limits import Limits
from opendsec.images.oci.nodes import Answers, Below, LayerTree, Question
from opendsec.images.oci.tarstream import BadLayer, TarStream
from opendsec.kernel.fds import write_all

_MAX_MESSAGE = 256 << 20
_MEMORY_BYTES = 8 << 30
_DECOMPRESSOR_BYTES = 1 << 30
_PIPE = 1 << 20


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One OCI layer: a descriptor of its file, and what must come out of it."""

    fd: int
    size: int
    diff_id: str
    name: str  # for people


class Made(msgspec.Struct, frozen=True, kw_only=True):
    notes: list[str]
    asked: list[tuple[Question, Below | None]]  # what the outcome depends on besides the layers themselves
    alone: bool  # nothing below shows through


class _Asked(msgspec.Struct, tag="asked"):
    questions: list[Question]


class _Answered(msgspec.Struct, tag="answered"):
    answers: list[Below | None]


class _Done(msgspec.Struct, tag="done"):
    notes: list[str]
    alone: bool


class _Failed(msgspec.Struct, tag="failed"):
    kind: str  # "bad", "space", "memory"
    message: str


_Message = _Asked | _Answered | _Done | _Failed


class _Link:
    """Messages over a socket, each with its length before it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: _Message) -> None:
        data = msgspec.json.encode(message)
        write_all(self.fd, len(data).to_bytes(8, "big") + data)

    def receive(self) -> _Message | None:
        size = int.from_bytes(self._exactly(8), "big")
        if not size:
            return None
        if size > _MAX_MESSAGE:
            raise Internal("a converter said too much")
        return msgspec.json.decode(self._exactly(size), type=_Message)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = os.read(self.fd, min(count - len(data), 1 << 20))
            if not more:
                return b""
            data += more
        return bytes(data)


# --- confined ----------------------------------------------------------------------------------------------------------


def _failure(error: BaseException) -> _Failed:
    if isinstance(error, BadLayer):
        return _Failed("bad", str(error))
    if isinstance(error, MemoryError):
        return _Failed("memory", "")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _Failed("space", "")
    raise error


def _decompressor(source: int, target: int, report: int) -> None:
    link = _Link(report)
    try:
        for data in decompress.decompressed(source):
            write_all(target, data)
        link.send(_Done([], False))
    except BrokenPipeError:
        pass  # nobody wants the rest
    except Exception as error:
        link.send(_failure(error))


def _converter(inputs: Sequence[int], data: int, meta: int, report: int, limits: Limits) -> None:
    link = _Link(report)
    try:
        tree, blob = LayerTree(limits), Blob(data)
        for number, fd in enumerate(inputs):
            if number:
                tree.next_layer()
            stream = TarStream(functools.partial(os.read, fd), limits)
            for entry in stream:
                inode = tree.add(entry)
                if inode is not None:
                    blob.store(inode, entry.segments, stream.content())
        while questions := tree.questions():
            link.send(_Asked(questions))
            message = link.receive()
            if not isinstance(message, _Answered):
                return
            tree.answer({question.path: answer for question, answer in zip(questions, message.answers, strict=True)})
        tree.finish()
        blob.flush()
        write_metadata(tree.root, meta, blob.blocks)
        link.send(_Done(tree.all_notes(), tree.root.opaque))
    except Exception as error:
        link.send(_failure(error))


# --- trusted -----------------------------------------------------------------------------------------------------------


def convert(inputs: Sequence[Input], out: Path, answers: Answers, *, limits: Limits, progress: Callable[[int, int], None]) -> Made:
    """Make `meta.erofs` and `data.blob` in the directory `out` of OCI layers, lowest first. `progress` gets the number of the input
    and how much of it has been read. Raises InvalidRequest naming the layer, Unavailable (no space), Internal."""
    decompress.warm_up()
    hashlib.sha256(b"").digest()
    with contextlib.ExitStack() as held:
        data = _create(out / DATA, held)
        meta = _create(out / META, held)
        ours, theirs = socket.socketpair()
        held.enter_context(ours)
        readers, writers = _Ends(), _Ends()
        held.enter_context(readers)
        held.enter_context(writers)
        for _ in inputs:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            readers.fds.append(reader)
            writers.fds.append(writer)
        with theirs:
            pid = confine.start(
                lambda: _converter(readers.fds, data, meta, theirs.fileno(), limits),
                (*readers.fds, data, meta, theirs.fileno()),
                memory_bytes=_MEMORY_BYTES,
                file_bytes=limits.tar_bytes + (64 << 30),
            )
        with _ending(pid):
            readers.close()
            link = _Link(ours.fileno())
            for number, input in enumerate(inputs):
                try:
                    _pump(input, writers.fds[0], limits, functools.partial(progress, number))
                except BrokenPipeError:
                    break  # the converter has ended, and says why
                writers.close_first()
            writers.close()
            return _outcome(link, answers, inputs)


def _outcome(link: _Link, answers: Answers, inputs: Sequence[Input]) -> Made:
    asked: list[tuple[Question, Below | None]] = []
    while True:
        try:
            message = link.receive()
        except (msgspec.DecodeError, ConnectionError):
            message = None
        if isinstance(message, _Asked):
            found = answers(message.questions)
            asked.extend(zip(message.questions, found, strict=True))
            link.send(_Answered(found))
        elif isinstance(message, _Done):
            return Made(notes=message.notes, asked=asked, alone=message.alone)
        elif isinstance(message, _Failed):
            raise _error(message, "layer " + " or ".join(input.name for input in inputs))
        else:
            raise Internal("the process that converts a layer ended without a word")


def _error(failed: _Failed, name: str) -> InvalidRequest | Unavailable:
    if failed.kind == "space":
        return Unavailable("no space left for the image")
    if failed.kind == "memory":
        return InvalidRequest(f"{name} takes more memory to convert than it may", field="reference")
    return InvalidRequest(f"{name} {failed.message}", field="reference")


@contextlib.contextmanager
def unpacked(source: int, name: str, size: int, limits: Limits) -> Iterator[Callable[[int], bytes]]:
    """A function that reads the decompressed content of a file; it raises InvalidRequest, also for what grows beyond the limits."""
    decompress.warm_up()
    ours, theirs = socket.socketpair()
    reader, end = os.pipe2(os.O_CLOEXEC)
    os.lseek(source, 0, os.SEEK_SET)
    with ours, contextlib.ExitStack() as held:
        held.callback(os.close, reader)
        with theirs:
            try:
                pid = confine.start(
                    lambda: _decompressor(source, end, theirs.fileno()),
                    (source, end, theirs.fileno()),
                    memory_bytes=_DECOMPRESSOR_BYTES,
                    file_bytes=0,
                )
            finally:
                os.close(end)
        held.enter_context(_ending(pid))
        total, ended = 0, False

        def read(count: int) -> bytes:
            nonlocal total, ended
            block = b"" if ended else os.read(reader, count)
            if not block:
                if ended:
                    return b""
                ended = True
                message = _Link(ours.fileno()).receive()
                if isinstance(message, _Failed):
                    raise _error(message, name)
                if not isinstance(message, _Done):
                    raise Internal("the process that decompresses ended without a word")
                return b""
            total += len(block)
            if total > limits.tar_bytes:
                raise InvalidRequest(f"{name} unpacks to more than {limits.tar_bytes} bytes", field="reference")
            if total > limits.ratio_from_bytes and total > limits.ratio * size:
                raise InvalidRequest(f"{name} unpacks to more than {limits.ratio} times its size: a decompression bomb", field="reference")
            return block

        yield read


def _pump(input: Input, writer: int, limits: Limits, progress: Callable[[int], None]) -> None:
    """Everything of a layer to the converter, if it is the layer that its diff_id says."""
    digest = hashlib.sha256()
    name = f"layer {input.name}"
    with unpacked(input.fd, name, input.size, limits) as read:
        while block := read(_PIPE):
            digest.update(block)
            write_all(writer, block)
            progress(os.lseek(input.fd, 0, os.SEEK_CUR))
    found = f"sha256:{digest.hexdigest()}"
    if found != input.diff_id:
        raise InvalidRequest(f"{name} is not what the image's config says: diff_id {input.diff_id}, but found {found}", field="reference")


class _Ends:
    """Ends of pipes, closed by hand as soon as they are not needed, since an end of file must arrive."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def close_first(self) -> None:
        os.close(self.fds.pop(0))

    def close(self) -> None:
        while self.fds:
            self.close_first()

    def __enter__(self) -> _Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _ending(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        confine.kill(pid)


def _create(path: Path, held: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    held.callback(os.close, fd)
    return fd
