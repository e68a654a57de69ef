# SPDX-License-Identifier: Apache-2.0
"""The route table: the one source for the server, the client and the published schema.

Paths hold `{name}` placeholders. `request` is the JSON body's type; None means no body or a raw one (`raw_request`).
`response` is the JSON body's type; with `stream` it is the type of one NDJSON line; None means no content or a raw body.

Every route that `mutates` takes an action id, in the field `action_id` of its JSON body where that has one, else as a query parameter.
The exceptions are streams of progress, which may be repeated as they are: what they make is named by its content.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from opendsec.api import exec as x
from opendsec.api import files as f
from opendsec.api import fn, spec
from opendsec.api import images as i
from opendsec.api import sandboxes as s
from opendsec.api import screen as c
from opendsec.api import snapshots as n


class Route(NamedTuple):
    method: str
    path: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()
    stream: bool = False
    raw_request: bool = False
    raw_response: bool = False
    mutates: bool = False


_BOX = "/v1/sandboxes/{sandbox_id}"
_PROC = _BOX + "/processes/{process_id}"
_SESSION = _BOX + "/sessions/{session_id}"

INFO = Route("GET", "/v1/info", response=s.EdgeInfo)
CAPABILITIES = Route("GET", "/v1/capabilities", response=s.Capabilities)
EVENTS = Route("GET", "/v1/events", response=s.Event, query=("sandbox_id", "after", "follow"), stream=True)
DRAIN = Route("POST", "/v1/drain", response=s.EdgeInfo, query=("action_id",), mutates=True)  # no new sandboxes from now on
SHUTDOWN = Route("POST", "/v1/shutdown", response=s.EdgeInfo, query=("kill", "action_id"), mutates=True)  # kill=1: all sandboxes first

CREATE = Route("POST", "/v1/sandboxes", spec.CreateRequest, s.CreateResponse, mutates=True)
LIST = Route("GET", "/v1/sandboxes", response=s.SandboxList, query=("label", "state"))
GET = Route("GET", _BOX, response=s.SandboxInfo)
USAGE = Route("GET", _BOX + "/usage", response=s.Usage)
KILL = Route("DELETE", _BOX, response=s.SandboxInfo, query=("action_id",), mutates=True)

PAUSE = Route("POST", _BOX + "/pause", response=s.SandboxInfo, query=("action_id",), mutates=True)  # any request but a few resumes it
RESUME = Route("POST", _BOX + "/resume", response=s.SandboxInfo, query=("action_id",), mutates=True)
FORK = Route("POST", _BOX + "/fork", n.ForkRequest, s.CreateResponse, mutates=True)
SNAPSHOT = Route("POST", _BOX + "/snapshot", n.SnapshotRequest, n.SnapshotInfo, mutates=True)
SNAPSHOTS = Route("GET", "/v1/snapshots", response=n.SnapshotList)
SNAPSHOT_REMOVE = Route("DELETE", "/v1/snapshots/{name}", response=n.SnapshotList, query=("action_id",), mutates=True)

SCREEN = Route("GET", _BOX + "/screen", raw_response=True)  # a PNG
SCREEN_SIZE = Route("GET", _BOX + "/screen/size", response=c.ScreenSize)
SCREEN_RESIZE = Route("POST", _BOX + "/screen/size", c.ScreenSize, c.ScreenSize, query=("action_id",), mutates=True)
INPUT = Route("POST", _BOX + "/screen/input", c.InputRequest, c.ScreenSize, query=("action_id",), mutates=True)
VNC = Route("POST", _BOX + "/screen/vnc", response=c.VncTicket)
VNC_STREAM = Route("POST", "/v1/vnc/{token}", raw_request=True, raw_response=True)  # bytes of the VNC protocol both ways, at once

RUN = Route("POST", _BOX + "/run", x.Command, x.ExecResult, mutates=True)
STREAM = Route("POST", _BOX + "/stream", x.Command, x.ExecEvent, stream=True, mutates=True)
START = Route("POST", _BOX + "/processes", x.Command, x.ProcessInfo, mutates=True)
PROCESSES = Route("GET", _BOX + "/processes", response=x.ProcessList)
PROCESS = Route("GET", _PROC, response=x.ProcessInfo)
WAIT = Route("GET", _PROC + "/wait", response=x.ExecResult, query=("timeout_s",))
ATTACH = Route("GET", _PROC + "/stream", response=x.ExecEvent, query=("stdout_offset", "stderr_offset", "hold"), stream=True)
STDIN = Route("POST", _PROC + "/stdin", raw_request=True, query=("close", "action_id"), mutates=True)
SIGNAL = Route("POST", _PROC + "/signal", x.SignalRequest, x.ProcessInfo, query=("action_id",), mutates=True)
RESIZE = Route("POST", _PROC + "/resize", x.Pty, x.ProcessInfo, query=("action_id",), mutates=True)

OPEN_SESSION = Route("POST", _BOX + "/sessions", x.SessionRequest, x.SessionInfo, mutates=True)
SESSION = Route("GET", _SESSION, response=x.SessionInfo)
SESSION_RUN = Route("POST", _SESSION + "/run", x.SessionRun, x.ExecResult, mutates=True)
SESSION_CLOSE = Route("DELETE", _SESSION, response=x.SessionInfo, query=("action_id",), mutates=True)

READ = Route("GET", _BOX + "/files", query=("path", "offset", "length"), raw_response=True)
WRITE = Route(
    "PUT",
    _BOX + "/files",
    response=f.Written,
    query=("path", "mode", "user", "append", "parents", "action_id"),
    raw_request=True,
    mutates=True,
)
STAT = Route("GET", _BOX + "/files/stat", response=f.FileInfo, query=("path", "follow"))
LIST_FILES = Route("GET", _BOX + "/files/list", response=f.FileList, query=("path",))
MKDIR = Route("POST", _BOX + "/files/mkdir", response=f.FileInfo, query=("path", "mode", "user", "parents", "action_id"), mutates=True)
MOVE = Route("POST", _BOX + "/files/move", response=f.FileInfo, query=("path", "to", "action_id"), mutates=True)
REMOVE = Route("DELETE", _BOX + "/files", query=("path", "recursive", "action_id"), mutates=True)
CHMOD = Route("POST", _BOX + "/files/chmod", response=f.FileInfo, query=("path", "mode", "user", "action_id"), mutates=True)
DOWNLOAD = Route("GET", _BOX + "/archive", query=("path",), raw_response=True)  # a tar stream
UPLOAD = Route("PUT", _BOX + "/archive", response=f.Written, query=("path", "user", "action_id"), raw_request=True, mutates=True)
WATCH = Route("GET", _BOX + "/files/watch", response=f.WatchEvent, query=("path",), stream=True)

IMAGES = Route("GET", "/v1/images", response=i.ImageList)
IMAGE_BUILD = Route("POST", "/v1/images/build", i.BuildRequest, i.BuildEvent, stream=True, mutates=True)
IMAGE_COMPOSE = Route("POST", "/v1/images/compose", i.ComposeRequest, i.ImageInfo, query=("action_id",), mutates=True)
IMAGE_REMOVE = Route("DELETE", "/v1/images", query=("name", "action_id"), response=i.ImageList, mutates=True)
IMAGE_GC = Route("POST", "/v1/images/gc", response=i.Collected, query=("dry_run", "grace_s", "action_id"), mutates=True)
# Streams of progress that may be repeated as they are: what they make is named by its content.
IMAGE_PULL = Route("POST", "/v1/images/pull", i.PullRequest, i.BuildEvent, stream=True, mutates=True)
IMAGE_PUSH = Route("POST", "/v1/images/push", i.PushRequest, i.BuildEvent, stream=True, mutates=True)
IMAGE_WARM = Route("POST", "/v1/images/warm", i.WarmRequest, i.BuildEvent, stream=True, mutates=True)
IMAGE_TRACE = Route("POST", "/v1/images/trace", i.TraceRequest, i.TraceInfo, query=("action_id",), mutates=True)
IMAGE_INSPECT = Route("GET", "/v1/images/inspect", response=i.ImageDetail, query=("name",))
IMAGE_DIFF = Route("GET", "/v1/images/diff", response=i.DiffReport, query=("a", "b"))
IMAGE_LINT = Route("GET", "/v1/images/lint", response=i.LintReport, query=("name", "packages"))
IMAGE_VERIFY = Route("POST", "/v1/images/verify", response=i.LintReport, query=("name",))  # reads all that is local
STORES = Route("GET", "/v1/images/stores", response=i.StoreList)
PACK = Route("POST", _BOX + "/pack", i.PackRequest, i.PackResult, mutates=True)

FN = Route("POST", "/v1/fn", fn.FnCall, fn.FnResult, mutates=True)
# NDJSON both ways: a MapRequest, then FnInputs; results come as they end. It may be repeated as it is: calls leave nothing behind.
FN_MAP = Route("POST", "/v1/fn/map", response=fn.FnResult, raw_request=True, stream=True)
JUDGE = Route("POST", "/v1/fn/judge", fn.JudgeTask, fn.JudgeResult, mutates=True)
LANGUAGES = Route("GET", "/v1/fn/languages", response=fn.LanguageList)
POOLS = Route("GET", "/v1/fn/pools", response=fn.PoolList)
POOL_SET = Route("PUT", "/v1/fn/pools", fn.PoolSpec, fn.PoolInfo, query=("action_id",), mutates=True)  # made, or changed to this
POOL_RESIZE = Route("PATCH", "/v1/fn/pools/{name}", fn.PoolResize, fn.PoolInfo, mutates=True)
POOL_REMOVE = Route("DELETE", "/v1/fn/pools/{name}", response=fn.PoolList, query=("action_id",), mutates=True)  # drained first
# SandboxFusion's own request and answer (snake case, its field names); what it cannot say is in docs/fncall.md.
RUN_CODE = Route("POST", "/run_code", raw_request=True, raw_response=True)

ROUTES: dict[str, Route] = {name: value for name, value in list(globals().items()) if isinstance(value, Route)}
