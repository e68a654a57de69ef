# SPDX-License-Identifier: Apache-2.0
"""Running skopeo, the one program here that speaks to registries.

Credentials go into an authentication file of the job's workspace, which root alone may enter: never on a command line, in the
environment, or in a message. skopeo is given no other file of credentials, so a caller never acts with the operator's.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, Unauthorized, Unavailable
from opendsec.kernel import procfs

_LOOK_S = 0.25
FIRST_DELAY_S = 0.25  # before the second attempt; then twice as long each time
_PASSED_ON = ("PATH", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_SAID = re.compile(r'level=(?:fatal|error) msg=("(?:[^"\\]|\\.)*"|\S+)')


class Skopeo:
    def __init__(self, work: Path, host: str, *, token: str, tls_verify: bool, stall_s: float, retries: int) -> None:
        self._work, self._host, self._token = work, host, token
        self._stall_s, self._retries = stall_s, retries
        self.tls = "true" if tls_verify else "false"
        self._authfile = work / "auth.json"
        fd = os.open(self._authfile, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(authfile(host, token))

    def inspect(self, reference: str, *, config: bool) -> bytes:
        """The manifest, or the config, of an image of the registry: the bytes as they are there."""
        what = ["--config", "--raw"] if config else ["--raw"]
        return self._run(["inspect", "--no-tags", *what, f"--tls-verify={self.tls}", reference], None)

    def copy(self, source: str, target: str, *, down: bool, watched: Path | None, progress: Callable[[int], None]) -> None:
        """Copy an image. `down`: from the registry. `watched`: a directory whose growth is the progress."""
        side = "src" if down else "dest"
        arguments = [] if source.startswith("oci:") and not target.startswith("docker:") else [f"--{side}-tls-verify={self.tls}"]
        self._run(["copy", "--quiet", *arguments, source, target], watched, progress)

    def _run(self, arguments: Sequence[str], watched: Path | None, progress: Callable[[int], None] = lambda done: None) -> bytes:
        """What it prints. Tried again for what may pass; blobs that are there already are not fetched again."""
        for attempt in range(self._retries):
            try:
                return self._once(arguments, watched, progress)
            except Unavailable as error:
                if error.field != "reference":
                    raise  # nothing of the registry's
            time.sleep(FIRST_DELAY_S * 2**attempt)
        return self._once(arguments, watched, progress)

    def _once(self, arguments: Sequence[str], watched: Path | None, progress: Callable[[int], None]) -> bytes:
        verb, *rest = arguments
        command = ["skopeo", "--insecure-policy", verb, f"--authfile={self._authfile}", *rest]
        out, said = self._work / "skopeo.out", self._work / "skopeo.err"
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        home = os.fspath(self._work)
        with open(out, "w+b") as out_file, open(said, "w+b") as said_file:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=said_file,
                    cwd=home,
                    env={**environment, "HOME": home, "TMPDIR": home, "XDG_RUNTIME_DIR": home},
                    close_fds=False,  # it too holds the workspace: see `ImageStore.workspace`
                )
            except FileNotFoundError:
                raise Unavailable("skopeo is not installed (Debian package skopeo)") from None
            with process:
                try:
                    self._wait(process, watched, progress)
                except BaseException:
                    process.kill()
                    raise
            if process.returncode:
                said_file.seek(0)
                raise self._error(process.returncode, said_file.read(1 << 20).decode(errors="replace"))
            out_file.seek(0)
            return out_file.read(64 << 20)

    def _wait(self, process: subprocess.Popen[bytes], watched: Path | None, progress: Callable[[int], None]) -> None:
        """Until it has ended. Raises Unavailable if nothing arrives any more."""
        fd = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            arrived, since = b"", time.monotonic()
            while not poll.poll(_LOOK_S * 1000):
                now = time.monotonic()
                if watched is not None:
                    progress(_size(watched))
                found = _moved(process.pid)
                if found != arrived:
                    arrived, since = found, now
                elif now - since > self._stall_s:
                    raise Unavailable(f"the registry {self._host} has sent nothing for {self._stall_s:g} s", field="reference")
        finally:
            os.close(fd)

    def _error(self, status: int, text: str) -> OpenDSecError:
        found = [bare.strip('"').replace('\\"', '"') for bare in _SAID.findall(text)]
        said = self._scrub((found[-1] if found else text.strip()[-1000:]) or f"status {status}")[:1000]
        return error_for(said, self._host) if status > 0 else Unavailable(f"skopeo was killed by signal {signal.Signals(-status).name}")

    def _scrub(self, text: str) -> str:
        for secret in (self._token, self._token.partition(":")[2], base64.b64encode(self._token.encode()).decode()):
            if secret:
                text = text.replace(secret, "…")
        return text


def authfile(host: str, token: str) -> bytes:
    """`user:password`, or a token that the registry's token server takes for a password (an identity token)."""
    if not token:
        return b"{}"
    if ":" in token:
        entry = {"auth": base64.b64encode(token.encode()).decode()}
    else:
        entry = {"auth": base64.b64encode(b"00000000-0000-0000-0000-000000000000:").decode(), "identitytoken": token}
    return msgspec.json.encode({"auths": {host: entry}})


def error_for(said: str, host: str) -> OpenDSecError:
    """The error that skopeo's last words mean."""
    low = said.lower()

    def has(*words: str) -> bool:
        return any(word in low for word in words)

    if has("no space left", "disk quota"):
        return Unavailable("no space left for the image")
    if has(
        "unauthorized", "authentication required", "requested access to the resource is denied", "invalid username/password", "status: 401"
    ):
        return Unauthorized(f"the registry {host} wants credentials, or refuses these: {said}", field="token")
    if has("manifest unknown", "name unknown", "repository name not known", "name_unknown", "manifest_unknown"):
        return NotFound(f"the registry {host} has no such image: {said}", field="reference")
    if has("server gave http response to https client"):
        return InvalidRequest(f"the registry {host} speaks no TLS: turn its verification off to use it all the same", field="tls_verify")
    if has("certificate"):
        return InvalidRequest(f"the certificate of the registry {host} cannot be verified: {said}", field="tls_verify")
    if has("doesn't support modifying existing images"):
        return Conflict("the file exists already", field="reference")
    if has("digest did not match", "digest mismatch", "does not match", "invalid checksum"):
        return Unavailable(f"the registry {host} sent something else than it should: {said}", field="reference")
    return Unavailable(f"the registry {host}: {said}", field="reference")


def _moved(pid: int) -> bytes:
    """What a process has read and written so far, by files and connections; as it stands in its account."""
    try:
        return procfs.read(procfs.path_of(pid, "io"))
    except OSError:
        return b""  # it has just ended


def _size(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
