# SPDX-License-Identifier: Apache-2.0
"""Images from Dockerfiles: what comes out, what is not done again, what failing leaves."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from opendsec.api.errors import Denied, InvalidRequest, NotFound
from opendsec.api.images import BuildEvent, BuildRequest, DockerfileSource, ImageInfo
from opendsec.api.spec import Container
from opendsec.edge import creating
from opendsec.edge.building import build_dockerfile
from opendsec.images.dockerfile.context import Entry, Reader
from tests.images import BASE
from tests.nodes import NodeEdge

pytestmark = pytest.mark.slow


class Builder:
    """Builds in one context; `events` of the last build."""

    def __init__(self, edge: NodeEdge, context: Path) -> None:
        self.edge, self.context = edge, context
        self.events: list[BuildEvent] = []

    async def __call__(self, text: str, name: str = "made", **fields: object) -> ImageInfo:
        self.events = []
        source = DockerfileSource(context=str(self.context), dockerfile=text, memory="256MiB", **fields)  # type: ignore[arg-type]
        return await build_dockerfile(self.edge.node, BuildRequest(name=name, source=source), progress=self.events.append, local=True)

    @property
    def log(self) -> list[str]:
        return [event.message for event in self.events if event.kind == "log"]

    @property
    def again(self) -> int:
        return self.log.count("as before")


@pytest.fixture
def build(edge: NodeEdge, tmp_path: Path) -> Builder:
    return Builder(edge, tmp_path)


ORDINARY = f"""
ARG BASE={BASE}
FROM $BASE AS first
ARG WHO=nobody
ENV GREETING="hello $WHO" PATH=/opt/bin:$PATH
WORKDIR /srv/app
RUN echo "$GREETING" >greeting && \\
    # a comment
    mkdir -p /opt/bin && printf '#!/bin/sh\\necho tool' >/opt/bin/tool && chmod 755 /opt/bin/tool
COPY src/ ./src/
COPY --chown=33:44 --chmod=640 *.txt docs/
USER nobody
RUN id -un >/tmp/who; tool >/tmp/said
USER root
RUN <<EOF
echo one >>lines
echo two >>lines
EOF
RUN cat <<A - >>lines
three $WHO
A

FROM first
COPY --from=first /srv/app/greeting /copied
COPY --from={BASE} /etc/debian_version /etc/passwd /from-image/
ADD tree.tar.gz /unpacked/
ENTRYPOINT ["/bin/cat"]
CMD ["/copied"]
LABEL who=me
"""


async def test_an_ordinary_dockerfile(build: Builder, edge: NodeEdge) -> None:
    for name, content in {"src/a.py": "a = 1\n", "src/deep/b": "b\n", "one.txt": "1", "two.txt": "2", "not.md": "n"}.items():
        path = build.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (build.context / "src/link").symlink_to("a.py")
    with tarfile.open(build.context / "tree.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("in/side")
        info.size, info.uid, info.mode = 3, 7, 0o4755
        archive.addfile(info, io.BytesIO(b"in\n"))
    image = await build(ORDINARY, args={"WHO": "world"})
    assert image.name == "made" and image.config.entrypoint == ("/bin/cat",) and image.config.cmd == ("/copied",)
    assert image.config.workdir == "/srv/app" and image.config.user == "root"
    assert image.config.env["GREETING"] == "hello world" and image.config.env["PATH"].startswith("/opt/bin:/usr/local/sbin")
    assert "WHO" not in image.config.env
    assert any("LABEL" in line for line in build.log)
    box = await edge.create("made")
    assert await edge.sh(box, "cat /copied greeting; tool") == "hello world\nhello world\ntool\n"
    assert await edge.sh(box, "cat lines") == "one\ntwo\nthree world\n"
    assert await edge.sh(box, "cat src/link src/deep/b; readlink src/link") == "a = 1\nb\na.py\n"
    assert await edge.sh(box, "stat -c '%n %a %u %g' docs/*") == "docs/one.txt 640 33 44\ndocs/two.txt 640 33 44\n"
    assert await edge.sh(box, "cat /tmp/who /tmp/said; ls /from-image; stat -c '%a %u' /unpacked/in/side") == (
        "nobody\ntool\ndebian_version\npasswd\n4755 7\n"
    )
    assert edge.node.promised.sandboxes == 1


async def test_what_was_done_is_not_done_again(build: Builder, edge: NodeEdge) -> None:
    text = f"FROM {BASE}\nCOPY a /a\nRUN cat /a >/b\nRUN date +%N >/c\n"
    (build.context / "a").write_text("1")
    first = await build(text)
    assert build.again == 0
    os.utime(build.context / "a", (1, 1))
    second = await build(text, name="other")
    assert build.again == 3 and second.layers == first.layers
    assert (await build(text, no_cache=True)).layers != first.layers
    (build.context / "a").write_text("2")
    third = await build(text)
    assert build.again == 0 and third.layers[:-3] == first.layers[:-3] and third.layers[-3] != first.layers[-3]
    (build.context / "a").write_text("1")
    await build(text.replace("date", "echo x; date"))
    assert build.again == 2
    argued = text.replace("COPY", "ARG X=1\nCOPY")
    await build(argued)
    await build(argued, args={"X": "2"})
    assert build.again == 1  # the argument is in the environment of what comes after it; a copy has none
    # The layers of a forgotten image go, and its steps run again.
    for name in ("made", "other"):
        await asyncio.to_thread(edge.store.remove, name)
    edge.store.gc(grace_s=-10)
    await build(text)
    assert build.again == 0


async def test_a_failing_step_tells_its_line_and_the_end_of_its_output(build: Builder, edge: NodeEdge) -> None:
    with pytest.raises(InvalidRequest, match=r"(?s)line 3: RUN .*: exit code 7; its output ends:\n.*late words") as error:
        await build(f"FROM {BASE}\n\nRUN echo early; seq 3000; echo late words >&2; exit 7\n")
    assert error.value.data == {"line": 3, "exit_code": 7} and "early" in build.log and "\nearly" not in str(error.value)
    with pytest.raises(InvalidRequest, match="no network"):
        await build(f"FROM {BASE}\nRUN python3 -c 'import socket; socket.getaddrinfo(\"packages.invalid\", 443)'\n")
    with pytest.raises(InvalidRequest, match="longer than"):
        await build(f"FROM {BASE}\nRUN sleep 60 & sleep 60\n", timeout_s=0.2)
    with pytest.raises(InvalidRequest, match="memory was used up"):
        await build(f"FROM {BASE}\nRUN python3 -c 'x = b\"x\" * (1 << 30)'\n")
    with pytest.raises(NotFound, match="line 1: FROM nothing-like-it"):
        await build("FROM nothing-like-it\n")
    with pytest.raises(InvalidRequest, match="line 2: COPY missing /: 'missing' is not there"):
        await build(f"FROM {BASE}\nCOPY missing /\n")
    assert edge.node.promised.sandboxes == 0 and [image.name for image in edge.store.list().images] == [BASE]
    assert edge.snapshots == []


async def test_nothing_outside_of_the_context_is_read(build: Builder, edge: NodeEdge, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("secret")
    (build.context / "absolute").symlink_to(outside)
    (build.context / "climbing").symlink_to(os.path.relpath(outside, build.context))
    (build.context / "file").symlink_to(outside / "secret")
    (build.context / "inside").symlink_to("real")
    (build.context / "real").mkdir()
    (build.context / "real/x").write_text("x")
    for source in ("absolute/secret", "climbing/secret", "file", "../outside/secret", "absolute/", "*/secret"):
        with pytest.raises(InvalidRequest, match=r"outside|not there"):
            await build(f"FROM {BASE}\nCOPY {source} /here/\n")
    await build(f"FROM {BASE}\nCOPY inside/x /x\nCOPY . /all/\n")
    box = await edge.create("made")
    assert await edge.sh(box, "cat /x; readlink /all/inside; cat /all/file || echo no") == "xreal\nno\n"
    # A hostile stage leads only within itself.
    with pytest.raises(InvalidRequest):
        await build(f"FROM {BASE} AS evil\nRUN ln -s {outside}/secret /lead\nFROM {BASE}\nCOPY --from=evil /lead /x\n")
    await build(f"FROM {BASE} AS evil\nRUN ln -s / /top\nFROM {BASE}\nCOPY --from=evil /top/etc/debian_version /x\n")


async def test_links_in_the_image_lead_a_copy_nowhere_outside(
    build: Builder, edge: NodeEdge, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("target")
    (build.context / "a").write_text("mine")
    prepare = f"mkdir -p {outside.parent} /real && ln -s {outside} /out && ln -s /real /in && mkdir {outside}"
    await build(f"FROM {BASE}\nRUN {prepare}\nCOPY a /in/a\nCOPY a /out/a\n")
    assert list(outside.iterdir()) == []
    box = await edge.create("made")
    assert await edge.sh(box, f"cat /real/a {outside}/a") == "minemine"


async def test_from_scratch(build: Builder, edge: NodeEdge) -> None:
    (build.context / "a").write_text("alone")
    copies = (("/bin/sh /bin/cat", "/bin/"), ("/usr/lib/*-linux-gnu/libc.so.6", "/lib/"), ("/lib64/*", "/lib64/"))
    text = "".join(f"COPY --from=other {sources} {to}\n" for sources, to in copies)
    image = await build(f"FROM {BASE} AS other\nFROM scratch\nCOPY a /b/a\n{text}RUN echo more >>/b/a\n")
    assert not set(image.layers) & {layer.digest for layer in edge.store.resolve(BASE).layers}
    box = await edge.create("made")
    assert await edge.sh(box, "cat /b/a; echo /*") == "alonemore\n/b /bin /dev /lib /lib64 /proc /sys /tmp\n"


async def test_the_ignore_file_and_the_target(build: Builder, edge: NodeEdge) -> None:
    (build.context / ".dockerignore").write_text("*.o\nsecret\n!secret/public\n**/cache\n# comment\n")
    for name in ("a.o", "a.c", "secret/key", "secret/public", "deep/cache/x", "deep/y"):
        (build.context / name).parent.mkdir(exist_ok=True, parents=True)
        (build.context / name).write_text(name)
    (build.context / "Dockerfile").write_text(f"FROM {BASE} AS first\nCOPY . /c/\nFROM {BASE} AS last\nRUN false\n")
    await build("", target="first")
    box = await edge.create("made")
    found = (await edge.sh(box, "cd /c && find . -type f | sort")).split()
    assert found == ["./.dockerignore", "./Dockerfile", "./a.c", "./deep/y", "./secret/public"]


async def test_cancelled_it_leaves_nothing(build: Builder, edge: NodeEdge) -> None:
    for text in ("RUN echo here; sleep 600", "RUN head -c 60M /dev/urandom >/x; echo here"):
        building = asyncio.ensure_future(build(f"FROM {BASE}\n{text}\n"))
        while "here" not in build.log:
            await asyncio.sleep(0.01)
        building.cancel()
        await asyncio.wait((building,))
        assert building.cancelled() and edge.node.promised.sandboxes == 0
    assert os.listdir(edge.store.root / "tmp") == [] and edge.snapshots == []


async def test_refusals(build: Builder, edge: NodeEdge) -> None:
    request = BuildRequest(name="x", source=DockerfileSource(context="/"))
    with pytest.raises(Denied):
        await build_dockerfile(edge.node, request, progress=lambda event: None, local=False)
    for text, words in (
        ("FROM a\nEXPOSE 80\n", "line 2: EXPOSE"),
        ("FROM a\nRUN --mount=type=cache,target=/x true\n", "line 2: RUN --mount"),
        (f"FROM {BASE}\nADD https://x.org/y /\n", "line 2: ADD"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await build(text)


async def test_the_sandbox_of_a_step_does_not_outlive_its_edge(edge: NodeEdge) -> None:
    spec = Container(image="made", memory="256MiB", disk="64MiB")
    box = await creating.create_from(edge.node, spec, edge.store.resolve(BASE))
    other = await edge.create()
    await edge.stop()
    await edge.start()
    assert edge.node.box(box.id).state.phase == "lost" and not edge.node.box(box.id).state.held
    assert await edge.sh(other, "echo on") == "on\n"


async def test_add_unpacks_archives_and_copies_the_rest(build: Builder, edge: NodeEdge) -> None:
    for compression in ("", "bz2", "xz"):
        with tarfile.open(build.context / f"a.{compression or 'tar'}", f"w:{compression}") as archive:  # type: ignore[call-overload]
            info = tarfile.TarInfo(f"from-{compression}")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    (build.context / "plain").write_text("plain")
    (build.context / "words.gz").write_bytes(gzip.compress(b"no archive"))
    (build.context / "dir").mkdir()
    shutil.copy(build.context / "a.tar", build.context / "dir/inner.tar")
    await build(f"FROM {BASE}\nADD --chown=nobody a.* plain words.gz /to/\nADD dir /dir\n")
    box = await edge.create("made")
    listing = "dir\n/dir:\ninner.tar\n\n/to:\nfrom-\nfrom-bz2\nfrom-xz\nplain\nwords.gz\n"
    assert "dir\n" + await edge.sh(box, "ls /dir /to") == listing
    assert await edge.sh(box, "stat -c %U /to /to/from-xz /to/plain | sort -u; zcat /to/words.gz") == "nobody\nno archive"
    (build.context / "cut.tar.gz").write_bytes(gzip.compress((build.context / "a.tar").read_bytes() * 50)[:-40])
    with pytest.raises(InvalidRequest, match="line 2: ADD"):
        await build(f"FROM {BASE}\nADD cut.tar.gz /x/\n")
    (build.context / "climbs.tar").write_bytes(b"")
    with tarfile.open(build.context / "climbs.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../outside"))
    with pytest.raises(InvalidRequest, match="leads outside"):
        await build(f"FROM {BASE}\nADD climbs.tar /x/\n")
    assert edge.snapshots == []


async def test_a_context_that_changes_while_it_is_read_is_no_image(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    (build.context / "a").write_text("first")
    original = Reader.entries

    def entries(self: Reader, paths: Sequence[bytes], to: str, *, limit_bytes: int) -> list[Entry]:
        found = original(self, paths, to, limit_bytes=limit_bytes)
        (build.context / "a").write_text("other")
        return found

    monkeypatch.setattr(Reader, "entries", entries)
    with pytest.raises(InvalidRequest, match="was changed while it was read"):
        await build(f"FROM {BASE}\nCOPY a /a\n")


async def test_collecting_without_a_grace_period_takes_nothing_of_what_is_being_built(build: Builder, edge: NodeEdge) -> None:
    """Between its publishing and its naming nothing but the build itself knows of a layer."""
    text = f"FROM {BASE}\n" + "".join(f"RUN date +%N >/made{number}\n" for number in range(3))
    source = DockerfileSource(context=str(build.context), dockerfile=text, memory="256MiB")
    made: list[str] = []
    async with aclosing(edge.node.images.build(edge.node, BuildRequest(name="made", source=source), local=True)) as events:
        building = asyncio.ensure_future(_last(events))
        while not building.done():
            made += (await edge.node.collect(dry_run=False, grace_s=0)).digests
            await asyncio.sleep(0)
        assert (await building).kind == "done"
    box = await edge.create("made")
    assert len((await edge.sh(box, "cat /made0 /made1 /made2")).split()) == 3
    image = await edge.node.images.image("made")
    assert not set(image.layers) & set(made)


async def _last(events: AsyncIterator[BuildEvent]) -> BuildEvent:
    return [event async for event in events][-1]
