# SPDX-License-Identifier: Apache-2.0
"""Wrong requests over HTTP: each is refused with a status of 4xx, a stable code, the field that is wrong and the rule, and leaves nothing
behind: no row in the journal, nothing on the machine.

    @pytest.mark.parametrize("name", edge_bad_input.CASES)
    async def test_bad_input(name, edge):
        await edge_bad_input.check_case(name, edge, world)        # world: await edge_bad_input.World.make(edge)
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass

import httpx

from opendsec.api import wire
from opendsec.testing.contracts.edge_api import WORK, Edge

NO_BOX, NO_PROCESS, NO_SESSION = "sb_0000000000000000", "proc_0000000000000000", "sess_0000000000000000"
MIB = 1 << 20


@dataclass(frozen=True)
class World:
    """What cases refer to: `{box}` a running sandbox, `{stopped}` an ended one, `{ended}` and `{sleep}` commands of the first."""

    names: dict[str, str]

    @classmethod
    async def make(cls, edge: Edge) -> World:
        running, stopped = (slot.sandbox for slot in await edge.create(2))
        assert running is not None and stopped is not None
        box, gone = f"/v1/sandboxes/{running.id}", f"/v1/sandboxes/{stopped.id}"
        (await edge.client.delete(gone)).raise_for_status()
        (await edge.client.post(f"{box}/files/mkdir?path={WORK}&parents=1")).raise_for_status()
        (await edge.client.put(f"{box}/files?path={WORK}/file", content=b"x")).raise_for_status()
        ended = (await edge.client.post(f"{box}/run", json={"argv": ["true"], "action_id": "used"})).json()["process_id"]
        sleep = (await edge.client.post(f"{box}/processes", json={"argv": ["sleep", "1000"]})).json()["id"]
        return cls({"box": box, "stopped": gone, "ended": f"{box}/processes/{ended}", "sleep": f"{box}/processes/{sleep}", "work": WORK})


@dataclass(frozen=True)
class Case:
    method: str
    path: str
    body: object = None  # sent as JSON
    raw: bytes | None = None
    field: str | None = None  # how the field of the error begins; None: it need not name one
    code: str = "invalid_request"
    status: int = 400
    tcp: str | None = None  # over TCP with this token ("" for none)
    authorization: str | None = None


def create(field: str, /, code: str = "invalid_request", status: int = 400, **fields: object) -> Case:
    """A create whose spec differs from a good one by these fields."""
    return Case("POST", "/v1/sandboxes", {"spec": fields}, field=field, code=code, status=status)


def run(field: str | None, /, code: str = "invalid_request", status: int = 400, **fields: object) -> Case:
    return Case("POST", "{box}/run", fields, field=field, code=code, status=status)


def pull(field: str, /, code: str = "invalid_request", status: int = 400, **fields: object) -> Case:
    return Case("POST", "/v1/images/pull", fields, field=field, code=code, status=status)


def push(field: str, /, code: str = "invalid_request", status: int = 400, **fields: object) -> Case:
    return Case("POST", "/v1/images/push", fields, field=field, code=code, status=status)


def pack(field: str, /, code: str = "invalid_request", status: int = 400, **fields: object) -> Case:
    return Case("POST", "{box}/pack", fields, field=field, code=code, status=status)


def machine(field: str, /, code: str = "invalid_request", status: int = 400, backend: str = "microvm", **fields: object) -> Case:
    """A create of a machine."""
    return create(field, code=code, status=status, **{"backend": backend, "memory": "128MiB", "disk": "64MiB", **fields})


def told(field: str, /, **event: object) -> Case:
    """Pointer and keyboard are told this."""
    return Case("POST", "{box}/screen/input", {"events": [event]}, field=field)


def missing(method: str, path: str, field: str | None = None) -> Case:
    return Case(method, path, field=field, code="not_found", status=404)


CASES: dict[str, Case] = {
    # --- JSON and HTTP
    "no body": Case("POST", "/v1/sandboxes", field="body"),
    "not JSON": Case("POST", "/v1/sandboxes", raw=b"{spec", field="body"),
    "not UTF-8": Case("POST", "/v1/sandboxes", raw=b'{"spec": {"backend": "container", "image": "\xff"}}', field="body"),
    "two documents": Case("POST", "/v1/sandboxes", raw=b"{}{}", field="body"),
    "an array": Case("POST", "/v1/sandboxes", [], field="body"),
    "nested without end": Case("POST", "/v1/sandboxes", raw=b"[" * 100_000, field="body"),
    "unknown field": Case("POST", "{box}/run", {"argv": ["true"], "shel": "x"}, field="body"),
    "unknown path": missing("GET", "/v1/nothing", "path"),
    "the root": missing("GET", "/", "path"),
    "other version": missing("GET", "/v2/info", "path"),
    "unknown part of a sandbox": missing("GET", "{box}/nothing", "path"),
    "trailing slash": missing("GET", "/v1/sandboxes/", "path"),
    "wrong method": Case("PUT", "/v1/sandboxes", field="method"),
    "unknown method": Case("BREW", "/v1/info", field="request"),
    "unknown query": Case("GET", "/v1/info?verbose=1", field="verbose"),
    "query given twice": Case("GET", "/v1/sandboxes?state=all&state=all", field="state"),
    "body where none belongs": Case("POST", "/v1/drain", {"now": True}, field="body"),
    "body of a kill": Case("DELETE", "{box}", {"why": "x"}, field="body"),
    # --- create
    "no spec": Case("POST", "/v1/sandboxes", {"count": 1}, field="body"),
    "no backend": Case("POST", "/v1/sandboxes", {"spec": {"image": "x", "backend": None}}, field="spec"),
    "unknown backend": create("spec.backend", backend="teleporter"),
    "unknown spec field": create("spec", gpus=1),
    "image of a wrong type": create("spec.image", image=7),
    "image name": create("image", image="../../etc"),
    "image that is not there": create("image", code="not_found", status=404, image="no-such-image"),
    "layer name": create("layers[0]", layers=["harness"[:0]]),
    "layer that is not there": create("layers[0]", code="not_found", status=404, layers=["toolkit:nothing@1"]),
    "too many layers": create("layers", layers=["toolkit:a@1"] * 65),
    "memory as a list": create("spec.memory", memory=[1]),
    "memory without unit": create("memory", memory="lots"),
    "memory below the least": create("memory", memory=1000),
    "negative memory": create("memory", memory=-1),
    "memory of a planet": create("memory", code="quota_exceeded", status=429, memory="15TiB"),
    "disk of a planet": create("", code="quota_exceeded", status=429, disk="15TiB"),
    "no cores": create("cpu", cpu=0),
    "cores as text": create("spec.cpu", cpu="two"),
    "weight": create("cpu_weight", cpu_weight=0),
    "one process": create("pids", pids=1),
    "half a process": create("spec.pids", pids=2.5),
    "inodes": create("inodes", inodes=1),
    "open files": create("open_files", open_files=1 << 30),
    "environment name": create("env", env={"A=B": "1"}),
    "environment value": create("env.A", env={"A": "\0"}),
    "environment of a wrong type": create("spec.env", env={"A": 1}),
    "user": create("user", user="Robert'); DROP TABLE"),
    "user number": create("user", user="65535"),
    "relative directory": create("workdir", workdir="work"),
    "host name": create("hostname", hostname="-a-"),
    "policy": create("policy", policy=""),
    "policy that is not there": create("policy", code="not_found", status=404, policy="no-network"),
    "label": create("labels", labels={"": "x"}),
    "label value": create("labels.a", labels={"a": "x" * 300}),
    "no time to live": create("ttl_s", ttl_s=0),
    "negative idle time": create("ttl_idle_s", ttl_idle_s=-1),
    "count of none": Case("POST", "/v1/sandboxes", {"spec": {}, "count": 0}, field="count"),
    "count of too many": Case("POST", "/v1/sandboxes", {"spec": {}, "count": 32_001}, field="count"),
    "action id": Case("POST", "/v1/sandboxes", {"spec": {}, "action_id": "a b"}, field="action_id"),
    "empty action id": Case("POST", "/v1/sandboxes", {"spec": {}, "action_id": ""}, field="action_id"),
    "action id of another action": Case(
        "POST", "/v1/sandboxes", {"spec": {}, "action_id": "used"}, field="action_id", code="conflict", status=409
    ),
    # --- sandboxes
    "sandbox that never was": missing("GET", f"/v1/sandboxes/{NO_BOX}", "sandbox_id"),
    "id that is none": missing("GET", "/v1/sandboxes/..", None),
    "id with a slash": missing("GET", "/v1/sandboxes/a%2fb", None),
    "kill of nothing": missing("DELETE", f"/v1/sandboxes/{NO_BOX}", "sandbox_id"),
    "usage of a stopped one": Case("GET", "{stopped}/usage", field="sandbox_id", code="conflict", status=409),
    "unknown state": Case("GET", "/v1/sandboxes?state=asleep", field="state"),
    "label without key": Case("GET", "/v1/sandboxes?label==x", field="label"),
    "events after a word": Case("GET", "/v1/events?after=yesterday", field="after"),
    "events after a negative": Case("GET", "/v1/events?after=-1", field="after"),
    "flag that is none": Case("GET", "/v1/events?follow=maybe", field="follow"),
    "kill by a bad action id": Case("DELETE", "{box}?action_id=%00", field="action_id"),
    "kill by a used action id": Case("DELETE", "{box}?action_id=used", field="action_id", code="conflict", status=409),
    # --- commands
    "nothing to run": run("argv"),
    "argv and shell": run("argv", argv=["true"], shell="true"),
    "empty argv": run("argv", argv=[]),
    "empty program": run("argv", argv=["", "x"]),
    "argv of numbers": run("argv[1]", argv=["echo", 1]),
    "NUL in an argument": run("argv[1]", argv=["echo", "a\0b"]),
    "argument too long": run("argv[1]", argv=["echo", "x" * 140_000]),
    "too much shell text": run("shell", shell="x" * 140_000),
    "relative cwd": run("cwd", argv=["true"], cwd="here"),
    "time-out of nothing": run("timeout_s", argv=["true"], timeout_s=0),
    "time-out of text": run("timeout_s", argv=["true"], timeout_s="soon"),
    "stdin that is not base64": run("stdin", argv=["cat"], stdin="!!"),
    "stdin mode": run("stdin_mode", argv=["cat"], stdin_mode="maybe"),
    "capture of a negative": run("capture_bytes", argv=["true"], capture_bytes=-1),
    "terminal without rows": run("pty.rows", argv=["true"], pty={"rows": 0}),
    "run in none": Case("POST", f"/v1/sandboxes/{NO_BOX}/run", {"argv": ["true"]}, field="sandbox_id", code="not_found", status=404),
    "run in a stopped one": Case("POST", "{stopped}/run", {"argv": ["true"]}, field="sandbox_id", code="conflict", status=409),
    "stream in a stopped one": Case("POST", "{stopped}/stream", {"argv": ["true"]}, field="sandbox_id", code="conflict", status=409),
    "run by a used action id": run("action_id", code="conflict", status=409, argv=["false"], action_id="used"),
    "unknown command": missing("GET", f"{{box}}/processes/{NO_PROCESS}", "process_id"),
    "wait for an unknown one": missing("GET", f"{{box}}/processes/{NO_PROCESS}/wait", "process_id"),
    "signal 0": Case("POST", "{sleep}/signal", {"signal": 0}, field="signal"),
    "signal by name": Case("POST", "{sleep}/signal", {"signal": "KILL"}, field="signal"),
    "wait for a negative time": Case("GET", "{sleep}/wait?timeout_s=-1", field="timeout_s"),
    "attach at a negative": Case("GET", "{sleep}/stream?stdout_offset=-1", field="stdout_offset"),
    "stdin of one without": Case("POST", "{sleep}/stdin", raw=b"x", code="conflict", status=409),
    "stdin of an ended one": Case("POST", "{ended}/stdin", raw=b"x", code="conflict", status=409),
    "resize without terminal": Case("POST", "{sleep}/resize", {"rows": 1, "cols": 1}, code="conflict", status=409),
    "resize to nothing": Case("POST", "{sleep}/resize", {"rows": 0, "cols": 1}, field="pty.rows"),
    "session that never was": missing("GET", f"{{box}}/sessions/{NO_SESSION}"),
    "session in a relative directory": Case("POST", "{box}/sessions", {"cwd": "x"}, field="cwd"),
    "run in no session": Case("POST", f"{{box}}/sessions/{NO_SESSION}/run", {"shell": "true"}, code="not_found", status=404),
    # --- files
    "no path": Case("GET", "{box}/files", field="path"),
    "relative path": Case("GET", "{box}/files?path=etc/passwd", field="path"),
    "NUL in a path": Case("GET", "{box}/files?path=/a%00b", field="path"),
    "path too long": Case("GET", "{box}/files?path=/" + "a/" * 2100, field="path"),
    "name too long": Case("GET", "{box}/files/stat?path=/" + "a" * 256, field="path"),
    "file that is not there": missing("GET", "{box}/files?path={work}/nothing"),
    "directory as a file": Case("GET", "{box}/files?path={work}", code="conflict", status=409),
    "file as a directory": Case("GET", "{box}/files/list?path={work}/file", code="conflict", status=409),
    "write over a directory": Case("PUT", "{box}/files?path={work}", raw=b"x", code="conflict", status=409),
    "write in no directory": Case("PUT", "{box}/files?path={work}/no/such/file", raw=b"x", code="not_found", status=404),
    "mode": Case("PUT", "{box}/files?path={work}/a&mode=999", raw=b"x", field="mode"),
    "mode of text": Case("POST", "{box}/files/mkdir?path={work}/a&mode=rwx", field="mode"),
    "mode too large": Case("POST", "{box}/files/chmod?path={work}/file&mode=77777", field="mode"),
    "chmod of nothing": Case("POST", "{box}/files/chmod?path={work}/file", field="mode"),
    "owner": Case("PUT", "{box}/files?path={work}/a&user=a:b:c", raw=b"x", field="user"),
    "owner that is not there": Case("PUT", "{box}/files?path={work}/a&user=nosuchuser", raw=b"x", field="user"),
    "negative offset": Case("GET", "{box}/files?path={work}/file&offset=-1", field="offset"),
    "move to nowhere": Case("POST", "{box}/files/move?path={work}/file", field="to"),
    "remove of nothing": missing("DELETE", "{box}/files?path={work}/nothing"),
    "write by a bad action id": Case("PUT", "{box}/files?path={work}/a&action_id=%0a", raw=b"x", field="action_id"),
    "write by a used action id": Case(
        "PUT", "{box}/files?path={work}/a&action_id=used", raw=b"x", field="action_id", code="conflict", status=409
    ),
    "files of a stopped one": Case("GET", "{stopped}/files?path=/", field="sandbox_id", code="conflict", status=409),
    "watch of nothing": missing("GET", "{box}/files/watch?path={work}/nothing"),
    "archive of nothing": missing("GET", "{box}/archive?path={work}/nothing"),
    "archive that is none": Case("PUT", "{box}/archive?path={work}", raw=b"no tar stream" * 100),
    # --- action ids of other routes
    "signal by a bad action id": Case("POST", "{sleep}/signal?action_id=a%20b", {"signal": 9}, field="action_id"),
    "signal by a used action id": Case(
        "POST", "{sleep}/signal?action_id=used", {"signal": 9}, field="action_id", code="conflict", status=409
    ),
    "resize by a bad action id": Case("POST", "{sleep}/resize?action_id=", {"rows": 1, "cols": 1}, field="action_id"),
    "stdin by a bad action id": Case("POST", "{sleep}/stdin?action_id=%ff", raw=b"x", field="action_id"),
    "stdin by a used action id": Case("POST", "{sleep}/stdin?action_id=used", raw=b"x", field="action_id", code="conflict", status=409),
    "stdin by two action ids": Case("POST", "{sleep}/stdin?action_id=a&action_id=b", raw=b"x", field="action_id"),
    "session to close by a bad action id": Case("DELETE", f"{{box}}/sessions/{NO_SESSION}?action_id=%00", field="action_id"),
    "no session to close": Case(
        "DELETE", f"{{box}}/sessions/{NO_SESSION}?action_id=free", field="session_id", code="not_found", status=404
    ),
    "mkdir by a bad action id": Case("POST", "{box}/files/mkdir?path={work}/a&action_id=" + "x" * 129, field="action_id"),
    "mkdir by a used action id": Case(
        "POST", "{box}/files/mkdir?path={work}/a&action_id=used", field="action_id", code="conflict", status=409
    ),
    "relative mkdir by a free action id": Case("POST", "{box}/files/mkdir?path=a&action_id=free", field="path"),
    "move by a bad action id": Case("POST", "{box}/files/move?path={work}/file&to={work}/b&action_id=a%2Cb", field="action_id"),
    "remove by a bad action id": Case("DELETE", "{box}/files?path={work}/file&action_id=%C3%A9", field="action_id"),
    "chmod by a bad action id": Case("POST", "{box}/files/chmod?path={work}/file&mode=600&action_id=%0a", field="action_id"),
    "archive by a bad action id": Case("PUT", "{box}/archive?path={work}&action_id=%25", raw=b"x", field="action_id"),
    "archive by a used action id": Case(
        "PUT", "{box}/archive?path={work}&action_id=used", raw=b"x", field="action_id", code="conflict", status=409
    ),
    "compose by a bad action id": Case(
        "POST", "/v1/images/compose?action_id=*", {"name": "x", "base": "y", "layers": []}, field="action_id"
    ),
    "image to remove by a bad action id": Case("DELETE", "/v1/images?name=x&action_id=%27", field="action_id"),
    "collect by a bad action id": Case("POST", "/v1/images/gc?action_id=a;b", field="action_id"),
    "collect by a used action id": Case("POST", "/v1/images/gc?action_id=used", field="action_id", code="conflict", status=409),
    "drain by a bad action id": Case("POST", "/v1/drain?action_id=%20", field="action_id"),
    "shutdown by a used action id": Case("POST", "/v1/shutdown?action_id=used", field="action_id", code="conflict", status=409),
    "build by an action id": Case("POST", "/v1/images/build?action_id=a", {"name": "x"}, field="action_id"),
    "list by an action id": Case("GET", "/v1/sandboxes?action_id=a", field="action_id"),
    "run by an action id in the query": Case("POST", "{box}/run?action_id=a", {"argv": ["true"]}, field="action_id"),
    # --- images
    "image without name": Case("DELETE", "/v1/images", field="name"),
    "image to remove": missing("DELETE", "/v1/images?name=no-such-image", "name"),
    "build of nothing": Case("POST", "/v1/images/build", {"name": "x"}, field="body"),
    "build of an unknown kind": Case("POST", "/v1/images/build", {"name": "x", "source": {"type": "magic"}}, field="source"),
    "build by a bad name": Case("POST", "/v1/images/build", {"name": "X Y", "source": {"type": "directory", "path": "/"}}, field="name"),
    "build from a relative path": Case(
        "POST", "/v1/images/build", {"name": "x", "source": {"type": "directory", "path": "x"}}, field="source.path"
    ),
    "compose with an unclear environment": Case(
        "POST", "/v1/images/compose", {"name": "x", "base": "y", "layers": [], "config": {"env": {"A=B": "x"}}}, field="config.env"
    ),
    "compose with arguments that nothing takes": Case(
        "POST", "/v1/images/compose", {"name": "x", "base": "y", "layers": [], "config": {"cmd": ["a\0b"]}}, field="config.cmd[0]"
    ),
    "compose of nothing": Case(
        "POST", "/v1/images/compose", {"name": "x", "base": "no-such-image", "layers": []}, field="base", code="not_found", status=404
    ),
    "collect maybe": Case("POST", "/v1/images/gc?dry_run=maybe", field="dry_run"),
    "collect with a negative grace": Case("POST", "/v1/images/gc?grace_s=-1", field="grace_s"),
    "collect with grace without end": Case("POST", "/v1/images/gc?grace_s=inf", field="grace_s"),
    "pull of nothing": Case("POST", "/v1/images/pull", {}, field="body"),
    "pull without a transport": pull("reference", reference="debian"),
    "pull without a host": pull("reference", reference="docker://debian"),
    "pull by another transport": pull("reference", reference="containers-storage:x"),
    "pull with a password in the reference": pull("reference", reference="docker://me:secret@r.test/x"),
    "pull of a relative path": pull("reference", reference="oci:layout"),
    "pull of a path that goes up": pull("reference", reference="oci:/srv/../etc"),
    "pull with a line break": pull("reference", reference="oci:/srv\n/x"),
    "pull under a bad name": pull("name", reference="oci:/srv/x", name="Not A Name"),
    "pull for another system": pull("platform", reference="oci:/srv/x", platform="windows/amd64"),
    "pull of a path with a token": pull("token", reference="oci:/srv/x", token="secret"),
    "pull with a binary token": pull("token", reference="docker://r.test/x", token="\x01"),
    "pull with a field that is none": pull("", reference="oci:/srv/x", layz=True),
    "pull from no store": pull("reference", code="not_found", status=404, reference="store:no-such-store/x"),
    "push of nothing": push("name", code="not_found", status=404, name="no-such-image", reference="oci:/srv/x"),
    "push under a bad name": push("name", name="../x", reference="oci:/srv/x"),
    "push to nowhere": push("reference", name="x", reference=""),
    "push to a digest": push("reference", name="x", reference="docker://r.test/x@sha256:" + "0" * 64),
    "push by an action id": Case("POST", "/v1/images/push?action_id=a", {"name": "x", "reference": "oci:/x"}, field="action_id"),
    "warm nothing": Case("POST", "/v1/images/warm", {"name": "no-such-image"}, field="name", code="not_found", status=404),
    "warm a bad name": Case("POST", "/v1/images/warm", {"name": "A"}, field="name"),
    "trace without a command": Case("POST", "/v1/images/trace", {"name": "x"}, field="argv"),
    "trace with NUL": Case("POST", "/v1/images/trace", {"name": "x", "argv": ["a\0"]}, field="argv[0]"),
    "trace without time": Case("POST", "/v1/images/trace", {"name": "x", "argv": ["a"], "timeout_s": 0}, field="timeout_s"),
    "trace of nothing": Case(
        "POST", "/v1/images/trace", {"name": "no-such-image", "argv": ["true"]}, field="", code="not_found", status=404
    ),
    "trace by a bad action id": Case("POST", "/v1/images/trace?action_id=a%20b", {"name": "x", "argv": ["a"]}, field="action_id"),
    "inspect without a name": Case("GET", "/v1/images/inspect", field="name"),
    "inspect a bad name": Case("GET", "/v1/images/inspect?name=..%2Fx", field="name"),
    "inspect nothing": missing("GET", "/v1/images/inspect?name=no-such-image", "name"),
    "diff with one side": Case("GET", "/v1/images/diff?a=x", field="b"),
    "diff with a path": Case("GET", "/v1/images/diff?a=%2Fetc&b=x", field="a"),
    "diff of nothing": missing("GET", "/v1/images/diff?a=no-such-image&b=no-such-image", "a"),
    "lint without a name": Case("GET", "/v1/images/lint", field="name"),
    "lint of nothing": missing("GET", "/v1/images/lint?name=no-such-image", "name"),
    "lint for a bad package": Case("GET", "/v1/images/lint?name=x&packages=a%20b", field="packages[0]"),
    "verify nothing": missing("POST", "/v1/images/verify?name=no-such-image", "name"),
    "verify with a body": Case("POST", "/v1/images/verify?name=x", {"deep": True}, field="body"),
    "build of a Dockerfile from a relative path": Case(
        "POST", "/v1/images/build", {"name": "x", "source": {"type": "dockerfile", "context": "here"}}, field="source.context"
    ),
    "build of a Dockerfile for no memory": Case(
        "POST",
        "/v1/images/build",
        {"name": "x", "source": {"type": "dockerfile", "context": "/", "memory": "lots"}},
        field="source.memory",
    ),
    # --- packing
    "pack without a name": pack("body"),
    "pack without a version": pack("name", name="x"),
    "pack under an impossible name": pack("name", name="X y@1"),
    "pack as a base": pack("kind", name="x@1", kind="base"),
    "pack as something else": pack("kind", name="x@1", kind="model"),
    "pack with a relative scrub": pack("scrub_paths[0]", name="x@1", scrub_paths=["tmp"]),
    "pack that keeps what is above": pack("keep_paths[0]", name="x@1", keep_paths=["/../etc"]),
    "pack of a package with blanks": pack("packages[0]", name="x@1", packages=["a b"]),
    "pack by a bad action id": pack("action_id", name="x@1", action_id="a b"),
    "pack by a used action id": pack("action_id", code="conflict", status=409, name="x@1", action_id="used"),
    "pack of a stopped one": Case("POST", "{stopped}/pack", {"name": "x@1"}, field="sandbox_id", code="conflict", status=409),
    "pack of none": Case("POST", f"/v1/sandboxes/{NO_BOX}/pack", {"name": "x@1"}, field="sandbox_id", code="not_found", status=404),
    # --- machines
    "machine with too little memory": machine("memory", memory="64MiB"),
    "machine with too small a disk": machine("disk", disk="1MiB"),
    "machine with too many cores": machine("cpu", cpu=65),
    "machine without an image": machine("image", image=""),
    "machine with an unknown field": machine("spec", firmware="x"),
    "hardware virtualisation as text": machine("spec.hardware_virtualization", hardware_virtualization="yes"),
    "container that wants hardware": create("spec", backend="container", hardware_virtualization=True),
    "container of a snapshot": create("spec", backend="container", snapshot="x"),
    "name of a snapshot": machine("snapshot", snapshot="A snapshot"),
    "name of a snapshot that is a path": machine("snapshot", snapshot="../x"),
    "snapshot as a number": machine("spec.snapshot", snapshot=7),
    "microVM with a screen": machine("spec", display="800x600"),
    "profile that is none": machine("profile", backend="vm", profile="amiga"),
    "profile of a wrong type": machine("spec.profile", backend="vm", profile=1),
    "screen that is none": machine("display", backend="vm", display="large"),
    "screen without height": machine("display", backend="vm", display="800x"),
    "screen too small": machine("display", backend="vm", display="8x6"),
    "screen too large": machine("display", backend="vm", display="99999x600"),
    # --- pause, fork, snapshots
    "pause with a body": Case("POST", "{box}/pause", {"force": True}, field="body"),
    "pause by a bad action id": Case("POST", "{box}/pause?action_id=a%20b", field="action_id"),
    "pause by force": Case("POST", "{box}/pause?force=1", field="force"),
    "pause of a stopped one": Case("POST", "{stopped}/pause", field="sandbox_id", code="conflict", status=409),
    "pause of none": missing("POST", f"/v1/sandboxes/{NO_BOX}/pause", "sandbox_id"),
    "resume with a body": Case("POST", "{box}/resume", {}, field="body"),
    "resume of a stopped one": Case("POST", "{stopped}/resume", field="sandbox_id", code="conflict", status=409),
    "resume of none": missing("POST", f"/v1/sandboxes/{NO_BOX}/resume", "sandbox_id"),
    "fork without a body": Case("POST", "{box}/fork", field="body"),
    "no forks": Case("POST", "{box}/fork", {"count": 0}, field="count"),
    "half a fork": Case("POST", "{box}/fork", {"count": 1.5}, field="count"),
    "too many forks": Case("POST", "{box}/fork", {"count": 1 << 20}, field="count"),
    "fork with a spec": Case("POST", "{box}/fork", {"count": 1, "memory": "1GiB"}, field="body"),
    "fork by a bad action id": Case("POST", "{box}/fork", {"action_id": "a b"}, field="action_id"),
    "fork by a used action id": Case("POST", "{box}/fork", {"action_id": "used"}, field="action_id", code="conflict", status=409),
    "fork of a stopped one": Case("POST", "{stopped}/fork", {}, field="sandbox_id", code="conflict", status=409),
    "fork of none": Case("POST", f"/v1/sandboxes/{NO_BOX}/fork", {}, field="sandbox_id", code="not_found", status=404),
    "snapshot under an impossible name": Case("POST", "{box}/snapshot", {"name": "../x"}, field="name"),
    "snapshot under a long name": Case("POST", "{box}/snapshot", {"name": "x" * 64}, field="name"),
    "snapshot of half the memory": Case("POST", "{box}/snapshot", {"memory": "half"}, field="memory"),
    "snapshot by a bad action id": Case("POST", "{box}/snapshot", {"action_id": ""}, field="action_id"),
    "snapshot of a stopped one": Case("POST", "{stopped}/snapshot", {}, field="sandbox_id", code="conflict", status=409),
    "snapshot of none": Case("POST", f"/v1/sandboxes/{NO_BOX}/snapshot", {}, field="sandbox_id", code="not_found", status=404),
    "removing no snapshot": missing("DELETE", "/v1/snapshots/none", "name"),
    "removing snapshots with a body": Case("DELETE", "/v1/snapshots/none", {"all": True}, field="body"),
    "a machine of no snapshot": machine("snapshot", code="not_found", status=404, snapshot="none"),
    # --- screens
    "screen of one that has none": Case("GET", "{box}/screen", field="sandbox_id", code="unsupported", status=422),
    "screen of none": missing("GET", f"/v1/sandboxes/{NO_BOX}/screen", "sandbox_id"),
    "size of a screen that is not there": Case("GET", "{box}/screen/size", field="sandbox_id", code="unsupported", status=422),
    "screen of another size": Case("POST", "{box}/screen/size", {"width": 1, "height": 600}, field="width"),
    "screen without a height": Case("POST", "{box}/screen/size", {"width": 800}, field="body"),
    "no input": Case("POST", "{box}/screen/input", {"events": []}, field="events"),
    "too much input": Case("POST", "{box}/screen/input", {"events": [{"kind": "key", "keys": "a"}] * 1001}, field="events"),
    "input of an unknown kind": told("events", kind="shake"),
    "input without a kind": told("events", x=1, y=1),
    "pointer beside the screen": told("events[0].x", kind="move", x=-1, y=0),
    "pointer below the screen": told("events[0].y", kind="click", x=0, y=99_999),
    "pointer without a place": told("events", kind="move", x=1),
    "button that is none": told("events", kind="button", button="fourth", down=True),
    "click without end": told("events[0].count", kind="click", x=0, y=0, count=100),
    "wheel that stands still": told("events[0].dx", kind="scroll", x=0, y=0),
    "wheel out of control": told("events[0].dy", kind="scroll", x=0, y=0, dy=1 << 20),
    "no key": told("events[0].keys", kind="key", keys=""),
    "no text": told("events[0].text", kind="text", text=""),
    "text that is a book": told("events[0].text", kind="text", text="x" * (17 << 10)),
    "VNC of one that has no screen": Case("POST", "{box}/screen/vnc", field="sandbox_id", code="unsupported", status=422),
    "VNC without a ticket": missing("POST", "/v1/vnc/none", "token"),
    # --- TCP
    "no token": Case("GET", "/v1/info", tcp="", field="authorization", code="unauthorized", status=401),
    "wrong token": Case("POST", "/v1/drain", tcp="wrong", field="authorization", code="unauthorized", status=401),
    "token before anything else": Case("GET", "/v1/nothing", tcp="wrong", field="authorization", code="unauthorized", status=401),
    "token by another scheme": Case(
        "GET", "/v1/info", tcp="", authorization="Basic eA==", field="authorization", code="unauthorized", status=401
    ),
}


async def check_case(name: str, edge: Edge, world: World) -> None:
    """Make the request and look at the answer, and at what is left."""
    case = CASES[name]
    before = (edge.occupied(), edge.records())
    content = case.raw
    if case.body is not None:
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("spec"), dict):
            body = {**body, "spec": {**edge.spec(), **body["spec"]}}
        content = json.dumps(body).encode()
    path = case.path
    for key, value in world.names.items():
        path = path.replace(f"{{{key}}}", value)
    if case.tcp is None:
        response = await edge.client.request(case.method, path, content=content)
    else:
        async with edge.tcp(case.tcp or None) as client:
            headers = {} if case.authorization is None else {"authorization": case.authorization}
            response = await client.request(case.method, path, content=content, headers=headers)
    look_at(response, case)
    assert (edge.occupied(), edge.records()) == before, "it left something behind"
    assert (await edge.client.get("/v1/info")).json()["state"] == "ready"


def look_at(response: httpx.Response, case: Case) -> None:
    assert response.status_code == case.status, f"{response.status_code} {response.text[:500]}"
    assert response.headers["content-type"] == "application/json"
    error = wire.decode(response.content, wire.ErrorResponse).error
    assert error.code == case.code, error
    assert error.field, error
    assert len(error.message) > 3 and "Traceback" not in response.text, error
    if case.field is not None:
        assert error.field is not None and error.field.startswith(case.field), error


async def check_oversize(edge: Edge) -> None:
    """A JSON body beyond the limit is refused, told in advance or not, and without being held in memory."""
    for told in (True, False):
        piece = b" " * MIB
        pieces = wire.MAX_BODY_BYTES // MIB + 2

        async def body(pieces: int = pieces, piece: bytes = piece) -> object:
            for _ in range(pieces):
                yield piece

        headers = {"content-length": str(pieces * MIB)} if told else {}
        response = await edge.client.post("/v1/sandboxes", content=body(), headers=headers)  # type: ignore[arg-type]
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["field"] == "body" and str(wire.MAX_BODY_BYTES) in error["message"]


def stdin_too_long() -> bytes:
    """A command whose input is longer than may be given at once."""
    return json.dumps({"argv": ["cat"], "stdin": b64encode(bytes((64 << 20) + 1)).decode()}).encode()
