# SPDX-License-Identifier: Apache-2.0
"""Kills a real process with SIGKILL at each file system call of a piece of work, and looks at what is left.

    python -m tests.integration.images_remote.crashes WORK DIRECTORY EVERY

For n = 1, 1 + EVERY, …: a fresh state; a child does the work and dies at its n-th call (Python's audit hook counts them); what is left
has to be what start-up takes; then the work is done again, undisturbed, and has to succeed. Until a child gets through alive. Prints how
many died.
A process of its own, because it forks, which needs one without threads.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from opendsec.api.images import BuildEvent, ImageConfig
from opendsec.images.layers import DATA
from opendsec.images.names import LayerName
from opendsec.images.remote.posix import PosixStore
from opendsec.images.transfer import pull_image, push_image
from tests.layers import add_image, add_layer, check_store, content, digest_of, make_first_version, new_store

SIZE = 3 << 20
CALLS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.utime",
    "os.chmod",
    "os.truncate",
    "fcntl.flock",
    "os.symlink",
    "os.scandir",
)


def silent(event: BuildEvent) -> None:
    pass


class Work:
    """In `base`: `here` and `there` are stores of a machine each, `remote` is the directory both know."""

    def __init__(self, base: Path) -> None:
        self.here, self.there, self.remote = base / "here", base / "there", base / "remote"

    def before(self) -> None: ...

    def work(self) -> None: ...

    def after(self) -> None: ...

    def done(self) -> None: ...

    def run(self, work: Callable[[PosixStore], Coroutine[object, object, object]]) -> None:
        async def go() -> None:
            store = PosixStore("team", self.remote, writable=True)
            await work(store)
            await store.close()

        asyncio.run(go())


class Publish(Work):
    def before(self) -> None:
        new_store(self.here)

    def work(self) -> None:
        store = new_store(self.here)
        digest = add_layer(store, "layer")
        store.name_layer(LayerName("workspace", "x", "1"), digest)
        store.name_image("image", [digest], ImageConfig())

    def after(self) -> None:
        check_store(self.here)

    def done(self) -> None:
        assert [layer.digest for layer in check_store(self.here).list().layers] == [digest_of("layer")]
        assert check_store(self.here).resolve("image").layers[0].data.read_bytes() == content("layer", 300_000)


class Upgrade(Work):
    def before(self) -> None:
        store = new_store(self.here)
        add_image(store, "image", "layer")
        make_first_version(store, digest_of("layer"))

    def work(self) -> None:
        new_store(self.here).chunk_table(digest_of("layer"))

    def after(self) -> None:
        check_store(self.here).resolve("image")

    def done(self) -> None:
        assert check_store(self.here).record(digest_of("layer")).chunks_sha256


class Collect(Work):
    def before(self) -> None:
        store = new_store(self.here)
        add_image(store, "kept", "a")
        for name in "bc":
            store.write_trace(add_layer(store, name), "start.trace", b"x")
            (store.cache / digest_of(name).replace(":", "-")).mkdir()
            (store.cache / digest_of(name).replace(":", "-") / "data.blob").write_bytes(b"x" * 5000)

    def work(self) -> None:
        new_store(self.here).gc(grace_s=0)

    def after(self) -> None:
        assert check_store(self.here).resolve("kept")

    def done(self) -> None:
        store = check_store(self.here)
        assert [layer.digest for layer in store.list().layers] == [digest_of("a")]
        assert os.listdir(store.cache) == os.listdir(store.traces) == []


class Push(Work):
    def before(self) -> None:
        self.remote.mkdir()
        add_image(new_store(self.here), "task", "a", "b")
        new_store(self.here).write_trace(digest_of("a"), "start.trace", b"x")

    def work(self) -> None:
        self.run(lambda remote: push_image(new_store(self.here), "task", remote, progress=silent))

    def after(self) -> None:
        """What can be seen is whole."""
        check_store(self.here)
        if os.path.isdir(self.remote / "images") and os.listdir(self.remote / "images"):
            self.done()
            shutil.rmtree(self.there)

    def done(self) -> None:
        there = new_store(self.there)
        self.run(lambda remote: pull_image(there, "task", remote, progress=silent, lazy=False))
        check_store(self.there)


class Pull(Work):
    lazy = False

    def before(self) -> None:
        self.remote.mkdir()
        add_image(new_store(self.here), "task", "a", "b", size=SIZE)
        self.run(lambda remote: push_image(new_store(self.here), "task", remote, progress=silent))
        new_store(self.there)

    def work(self) -> None:
        self.run(lambda remote: pull_image(new_store(self.there), "task", remote, progress=silent, lazy=self.lazy))

    def after(self) -> None:
        check_store(self.there)

    def done(self) -> None:
        store = check_store(self.there)
        assert store.image("task").layers == (digest_of("a"), digest_of("b"))
        assert os.listdir(store.partial) == []
        for name in "ab":
            there = store.directory(digest_of(name)) / DATA
            assert not there.exists() if self.lazy else there.read_bytes() == content(name, SIZE)


class PullLazily(Pull):
    lazy = True


class Complete(Pull):
    """Of a layer that is here without its data."""

    def before(self) -> None:
        super().before()
        self.run(lambda remote: pull_image(new_store(self.there), "task", remote, progress=silent, lazy=True))


WORKS = {work.__name__: work for work in (Publish, Upgrade, Collect, Push, Pull, PullLazily, Complete)}


def die_at(number: int, base: Path) -> None:
    left = number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in CALLS and (event == "fcntl.flock" or str(base) in str(arguments)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(name: str, base: Path, every: int) -> int:
    pristine, state = base / "pristine", base / "state"
    pristine.mkdir()
    WORKS[name](pristine).before()
    died, number = 0, 1
    while True:
        shutil.copytree(pristine, state, symlinks=True)
        work = WORKS[name](state)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                die_at(number, state)
                work.work()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), f"{name}, at call {number}: status {status}"
        try:
            if status == signal.SIGKILL:
                work.after()
                work.work()
            work.done()
        except BaseException as error:
            error.add_note(f"{name}, killed at call {number}")
            raise
        shutil.rmtree(state)
        if status == 0:
            print(died)
            return 0
        died += 1
        number += every


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
