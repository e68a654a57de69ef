# SPDX-License-Identifier: Apache-2.0
"""The contract of an edge on the wire, about action ids in queries: each change happens once, whoever asks again gets the same answer.

To be used as `edge_api`. Creating, killing, commands and writes of files are looked at there.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator

from opendsec.api import wire
from opendsec.api.exec import ExecResult, ProcessInfo, SessionInfo
from opendsec.api.files import FileInfo, FileList, Written
from opendsec.api.ids import new_id
from opendsec.api.images import Collected, ImageInfo, ImageList
from opendsec.api.sandboxes import EdgeInfo
from opendsec.testing.contracts.edge_api import WORK, Check, Edge

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


async def once(edge: Edge, method: str, path: str, body: object = None, *, content: bytes | None = None) -> str:
    """Send a request twice under one new action id: one answer. And another request under it, which must be refused. The id."""
    action = new_id("edge")
    url = f"{path}{'&' if '?' in path else '?'}action_id={action}"
    sent = content if body is None else json.dumps(body).encode()
    first = await edge.client.request(method, url, content=sent)
    assert first.status_code in (200, 204), f"{method} {url}: {first.status_code} {first.text}"
    again = await edge.client.request(method, url, content=sent)
    assert (again.status_code, again.content) == (first.status_code, first.content), f"{method} {url}"
    error = await edge.refuse(409, "POST", f"/v1/images/gc?dry_run=1&action_id={action}")
    assert (error.code, error.field) == ("conflict", "action_id")
    return action


@check
async def changes_files_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box:
        path = f"path={WORK}"
        action = await once(edge, "POST", f"{box}/files/mkdir?{path}/d")
        await edge.refuse(409, "POST", f"{box}/files/mkdir?{path}/other&action_id={action}")
        await edge.refuse(409, "POST", f"{box}/files/mkdir?{path}/d&parents=1&action_id={action}")
        await edge.refuse(409, "POST", f"{box}/files/mkdir?{path}/d")  # there it is, and without the id this is a request of its own
        await edge.call(Written, "PUT", f"{box}/files?{path}/a", content=b"a")
        await once(edge, "POST", f"{box}/files/move?{path}/a&to={WORK}/b")
        action = await once(edge, "POST", f"{box}/files/chmod?{path}/b&mode=600")
        await edge.call(FileInfo, "POST", f"{box}/files/chmod?{path}/b&mode=644")
        await edge.call(FileInfo, "POST", f"{box}/files/chmod?{path}/b&mode=600&action_id={action}")
        assert (await edge.call(FileInfo, "GET", f"{box}/files/stat?{path}/b")).mode == 0o644  # what came later is not undone
        action = await once(edge, "DELETE", f"{box}/files?{path}/b")
        await edge.call(Written, "PUT", f"{box}/files?{path}/b", content=b"another")
        assert (await edge.client.delete(f"{box}/files?{path}/b&action_id={action}")).status_code == 204
        assert (await edge.client.get(f"{box}/files?{path}/b")).content == b"another"
        failed = f"{box}/files?{path}/none&action_id={new_id('edge')}"
        await edge.refuse(404, "DELETE", failed)
        await edge.call(Written, "PUT", f"{box}/files?{path}/none", content=b"now")
        await edge.refuse(404, "DELETE", failed)  # a failure is a result, too


def tar_of(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@check
async def unpacks_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box:
        archive = f"{box}/archive?path={WORK}"
        action = await once(edge, "PUT", archive, content=tar_of("a", b"first"))
        await edge.call(Written, "PUT", f"{box}/files?path={WORK}/a", content=b"second")
        await edge.call(Written, "PUT", f"{archive}&action_id={action}", content=tar_of("a", b"first"))
        assert (await edge.client.get(f"{box}/files?path={WORK}/a")).content == b"second"
        assert (await edge.client.put(f"{archive}&action_id={action}", content=tar_of("a", b"other"))).status_code == 409
        streamed, large = f"{archive}&action_id={new_id('edge')}", tar_of("large", bytes(3 << 20))

        async def body(whole: bool) -> AsyncIterator[bytes]:
            yield large[: 2 << 20]
            if not whole:
                raise ConnectionAbortedError
            yield large[2 << 20 :]

        try:
            await edge.client.put(streamed, content=body(whole=False))
        except ConnectionAbortedError:
            pass
        for _ in range(2):  # what was cut off may come again
            response = await edge.client.put(streamed, content=body(whole=True))
            assert wire.decode(response.content, Written).size_bytes == 3 << 20
        await edge.refuse(409, "PUT", streamed)


@check
async def talks_to_commands_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box:
        body = {"shell": "trap 'echo got' USR1; cat; echo; stty size", "stdin_mode": "stream", "pty": {"rows": 5, "cols": 6}}
        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", body)
        process = f"{box}/processes/{info.id}"
        action = await once(edge, "POST", f"{process}/resize", {"rows": 11, "cols": 22})
        await edge.call(ProcessInfo, "POST", f"{process}/resize", {"rows": 33, "cols": 44})
        await edge.call(ProcessInfo, "POST", f"{process}/resize?action_id={action}", {"rows": 11, "cols": 22})
        await edge.refuse(409, "POST", f"{process}/resize?action_id={action}", {"rows": 1, "cols": 2})
        await edge.client.post(f"{process}/stdin", content=b"\x04")  # of a terminal: the end of the input
        assert b"33 44" in (await edge.call(ExecResult, "GET", f"{process}/wait")).stdout.head

        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["cat"], "stdin_mode": "stream"})
        process = f"{box}/processes/{info.id}"
        action = await once(edge, "POST", f"{process}/stdin", content=b"one\n")
        assert (await edge.client.post(f"{process}/stdin?action_id={action}", content=b"uno\n")).status_code == 409
        together = f"{process}/stdin?action_id={new_id('edge')}"
        for response in await asyncio.gather(*(edge.client.post(together, content=b"two\n" * 50_000) for _ in range(3))):
            assert response.status_code == 204, response.text
        await once(edge, "POST", f"{process}/stdin?close=1", content=b"three\n")
        result = await edge.call(ExecResult, "GET", f"{process}/wait")
        assert result.stdout.head + result.stdout.tail == b"one\n" + b"two\n" * 50_000 + b"three\n"

        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"]})
        process = f"{box}/processes/{info.id}"
        action = await once(edge, "POST", f"{process}/signal", {"signal": 15})
        await edge.refuse(409, "POST", f"{process}/signal?action_id={action}", {"signal": 9})
        assert (await edge.call(ExecResult, "GET", f"{process}/wait")).signal == 15
        session = await edge.call(SessionInfo, "POST", f"{box}/sessions", {"cwd": WORK})
        await once(edge, "DELETE", f"{box}/sessions/{session.id}")


@check
async def changes_images_once_for_one_action_id(edge: Edge) -> None:
    body = {"name": "once", "base": edge.image, "layers": []}
    action = await once(edge, "POST", "/v1/images/compose", body)
    await edge.refuse(409, "POST", f"/v1/images/compose?action_id={action}", {**body, "name": "twice"})
    removed = await once(edge, "DELETE", "/v1/images?name=once")
    await edge.call(ImageInfo, "POST", f"/v1/images/compose?action_id={action}", body)
    assert "once" not in [image.name for image in (await edge.call(ImageList, "GET", "/v1/images")).images]
    await edge.call(ImageInfo, "POST", "/v1/images/compose", body)
    await edge.call(ImageList, "DELETE", f"/v1/images?name=once&action_id={removed}")
    assert "once" in [image.name for image in (await edge.call(ImageList, "GET", "/v1/images")).images]
    await edge.call(ImageList, "DELETE", "/v1/images?name=once")
    collect = f"/v1/images/gc?action_id={new_id('edge')}"
    assert await edge.call(Collected, "POST", collect) == await edge.call(Collected, "POST", collect)
    await edge.refuse(409, "POST", f"{collect}&dry_run=1")


@check
async def refusals_leave_the_action_id_free(edge: Edge) -> None:
    async with edge.box() as box:
        before = edge.records()
        action = f"action_id={new_id('edge')}"
        await edge.refuse(400, "POST", f"{box}/files/mkdir?path=d&{action}")
        await edge.refuse(404, "POST", f"/v1/sandboxes/sb_0000000000000000/files/mkdir?path={WORK}/d&{action}")
        await edge.refuse(404, "POST", f"{box}/processes/proc_0000000000000000/signal?{action}", {"signal": 9})
        await edge.refuse(400, "POST", f"/v1/images/gc?dry_run=maybe&{action}")
        assert edge.records() == before
        await edge.call(FileInfo, "POST", f"{box}/files/mkdir?path={WORK}/d&{action}")
        await edge.refuse(409, "POST", f"{box}/files/mkdir?path={WORK}/e&{action}")


@check
async def tells_recorded_results_after_a_restart(edge: Edge) -> None:
    async with edge.box() as box:
        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"]})
        session = await edge.call(SessionInfo, "POST", f"{box}/sessions", {"cwd": WORK})
        await edge.call(Written, "PUT", f"{box}/files?path={WORK}/a", content=b"a")
        asked: list[tuple[str, str, bytes | None]] = [
            ("POST", f"{box}/files/mkdir?path={WORK}/d", None),
            ("POST", f"{box}/files/move?path={WORK}/a&to={WORK}/b", None),
            ("POST", f"{box}/files/chmod?path={WORK}/b&mode=600", None),
            ("DELETE", f"{box}/files?path={WORK}/b", None),
            ("PUT", f"{box}/archive?path={WORK}", tar_of("t", b"t")),
            ("POST", f"{box}/processes/{info.id}/signal?", b'{"signal": 9}'),
            ("DELETE", f"{box}/sessions/{session.id}?", None),
            ("POST", "/v1/images/compose?", json.dumps({"name": "once", "base": edge.image, "layers": []}).encode()),
            ("DELETE", "/v1/images?name=once", None),
            ("POST", "/v1/drain?", None),
        ]
        asked = [(method, f"{url}&action_id={new_id('edge')}", content) for method, url, content in asked]
        first = [await edge.client.request(method, url, content=content) for method, url, content in asked]
        assert [response.status_code for response in first] == [200, 200, 200, 204, 200, 200, 200, 200, 200, 200]
        (await edge.client.delete(f"{box}/files?path={WORK}/t")).raise_for_status()
        await edge.restart()
        again = [await edge.client.request(method, url, content=content) for method, url, content in asked]
        assert [response.content for response in again] == [response.content for response in first]
        assert [entry.name for entry in (await edge.call(FileList, "GET", f"{box}/files/list?path={WORK}")).entries] == ["d"]
        assert (await edge.call(EdgeInfo, "GET", "/v1/info")).state == "ready"  # it was the earlier edge that was to take no more
