# SPDX-License-Identifier: Apache-2.0
"""What is left out of a packed layer, and why: rules as data, and the matching of paths.

A rule is a pattern on the absolute path in the sandbox: `*` and `?` stay within one part, `**/` is any number of parts (also none), `~` a
home directory (`/root`, `/home/*`). It covers what it matches and all beneath. What a scrubbed path shows afterwards is what the
layers below have there: as if the sandbox had never written it. What it had *deleted* stays deleted (whiteouts are never scrubbed).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Check = Literal["", "key", "token", "core"]


class Rule(NamedTuple):
    """`check`: a look at the beginning of the file that decides: a private key, a token, a core dump."""

    name: str
    patterns: tuple[str, ...]
    reason: str
    check: Check = ""


RULES: tuple[Rule, ...] = (
    Rule(
        "scrub.history",
        (
            *("~/.bash_history", "~/.zsh_history", "~/.sh_history", "~/.ash_history", "~/.local/share/fish/fish_history", "~/.history"),
            *("~/.python_history", "~/.ipython/profile_*/history.sqlite*", "~/.node_repl_history", "~/.irb_history", "~/.pry_history"),
            *("~/.psql_history", "~/.mysql_history", "~/.sqlite_history", "~/.rediscli_history", "~/.mongo_history", "~/.dbshell"),
            *("~/.lesshst", "~/.local/state/lesshst", "~/.viminfo", "~/.local/share/nvim/shada", "~/.wget-hsts", "~/.gdb_history"),
            *("~/.local/state/python_history", "~/.local/share/recently-used.xbel"),
        ),
        "what was typed tells how the task was solved",
    ),
    Rule(
        "scrub.cache.python",
        ("~/.cache/pip", "~/.cache/uv", "~/.cache/pypoetry", "~/.cache/pipenv", "~/.cache/conda", "~/.conda/pkgs", "/opt/conda/pkgs/cache"),
        "can be had again, and may hold the package that is the answer",
    ),
    Rule(
        "scrub.cache.node",
        (
            *("~/.npm/_cacache", "~/.npm/_logs", "~/.npm/_npx", "~/.cache/node", "~/.cache/yarn", "~/.yarn/cache", "~/.yarn/berry/cache"),
            *("~/.cache/pnpm", "~/.local/share/pnpm/store", "~/.bun/install/cache", "~/.cache/deno"),
        ),
        "can be had again, and may hold the package that is the answer",
    ),
    Rule(
        "scrub.cache.system",
        (
            *("/var/cache/apt/*", "/var/lib/apt/lists/*", "/var/cache/debconf/*-old", "/var/cache/ldconfig/*", "/var/cache/dnf/*"),
            *("/var/cache/yum/*", "/var/cache/apk/*", "/var/cache/pacman/pkg/*"),
        ),
        "can be had again",
    ),
    Rule(
        "scrub.cache.build",
        (
            *("~/.cargo/registry/cache", "~/.cargo/registry/index", "~/.cargo/git/db", "/usr/local/cargo/registry/cache"),
            *("/usr/local/cargo/registry/index", "~/.cache/go-build", "~/go/pkg/mod/cache/download", "/go/pkg/mod/cache/download"),
            *("~/.cache/ccache", "~/.ccache", "~/.cache/sccache", "~/.cache/bazel", "~/.gradle/caches", "~/.m2/repository/.cache"),
        ),
        "can be had again, and may hold the package that is the answer",
    ),
    Rule(
        "scrub.credentials",
        (
            *("**/.netrc", "**/.git-credentials", "~/.config/git/credentials", "~/.aws", "~/.azure", "~/.config/gcloud", "~/.kube"),
            *("~/.docker/config.json", "~/.config/containers/auth.json", "~/.config/gh/hosts.yml", "~/.config/hub", "~/.config/glab-cli"),
            *("~/.cache/huggingface/token", "~/.huggingface/token", "~/.config/rclone/rclone.conf", "~/.s3cfg", "~/.boto", "~/.pgpass"),
            *("~/.my.cnf", "~/.cargo/credentials", "~/.cargo/credentials.toml", "~/.gem/credentials", "~/.vault-token", "~/.terraform.d"),
            *("~/.gnupg/private-keys-v1.d", "~/.gnupg/secring.gpg", "~/.ssh/agent", "~/.config/op", "~/.password-store"),
        ),
        "whoever has the layer would have the account",
    ),
    Rule("scrub.credentials.key", ("**/.ssh/*", "**/*.pem", "**/*.key", "**/id_rsa", "**/id_ed25519"), "a private key", "key"),
    Rule("scrub.credentials.token", ("**/.npmrc", "**/.pypirc", "**/.yarnrc.yml", "**/pip.conf"), "a token or password", "token"),
    Rule("scrub.temporary", ("/tmp/*", "/var/tmp/*", "/run/*", "/var/run/*", "/dev/shm/*"), "temporary by its place"),
    Rule(
        "scrub.editor",
        ("**/.*.sw[a-p]", "**/.#*", "**/#*#", "~/.emacs.d/auto-save-list", "~/.local/state/nvim", "~/.vscode-server", "~/.cursor-server"),
        "left behind by an editor",
    ),
    Rule(
        "scrub.agent",
        (
            *("~/.claude", "~/.claude.json*", "**/.claude", "**/.cursor", "**/.aider*", "**/.codex", "**/.opencode", "~/.config/opencode"),
            *("~/.local/share/opencode", "~/.local/state/opencode", "**/.continue", "**/.cline", "**/.roo", "**/.windsurf", "~/.gemini"),
            *("~/.config/goose", "~/.local/share/goose", "~/.openhands", "**/.specstory", "~/.qwen", "~/.config/crush", "**/.crush"),
            *("~/.local/share/crush", "~/.swe-agent", "~/.config/github-copilot"),
        ),
        "left behind by an agent: transcripts tell how the task was solved",
    ),
    Rule("scrub.core", ("**/core", "**/core.*", "**/vgcore.*"), "the memory of a process", "core"),
    Rule("scrub.core", ("/var/crash/*", "/var/lib/systemd/coredump/*"), "the memory of a process"),
    Rule(
        "scrub.machine",
        ("/etc/machine-id", "/var/lib/dbus/machine-id", "/etc/resolv.conf", "/etc/hostname", "/var/lib/systemd/random-seed"),
        "belongs to the one machine, not to the layer",
    ),
    Rule(
        "scrub.logs",
        ("/var/log/**/*.log", "/var/log/apt/*", "/var/log/journal/*", "/var/log/wtmp", "/var/log/btmp"),
        "tells what was done",
    ),
)

LOOK_BYTES = 64 << 10
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----|^PuTTY-User-Key-File", re.MULTILINE)
_TOKEN = re.compile(rb"_auth|_password|authToken|^\s*password\s*[=:]|^\s*token\s*[=:]|://[^/\s:@]+:[^/\s@]+@", re.MULTILINE | re.IGNORECASE)


class Scrub(msgspec.Struct, frozen=True, kw_only=True):
    """What one pack leaves out: the rules or none, further patterns, and those that are kept whatever the others say."""

    rules: bool = True
    more: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


class Matcher:
    """Compiled. Paths are absolute bytes."""

    def __init__(self, scrub: Scrub, rules: Sequence[Rule] = RULES) -> None:
        self._rules = [(rule, _union(rule.patterns)) for rule in rules] if scrub.rules else []
        if scrub.more:
            more = Rule("scrub.asked", scrub.more, "asked for")
            self._rules.append((more, _union(more.patterns)))
        self._any = re.compile(b"|".join(pattern.pattern for _, pattern in self._rules), re.DOTALL) if self._rules else None
        self._keep = _union(scrub.keep) if scrub.keep else None

    @property
    def keeps(self) -> bool:
        """Whether something beneath a scrubbed directory may have to stay."""
        return self._keep is not None

    def kept(self, path: bytes) -> bool:
        return self._keep is not None and self._keep.fullmatch(path) is not None

    def rule(self, path: bytes, status: os.stat_result, folder_fd: int) -> Rule | None:
        """The rule that covers `path` itself, which lies in the directory `folder_fd`."""
        if self._any is None or not self._any.fullmatch(path) or self.kept(path):
            return None
        for rule, pattern in self._rules:
            if pattern.fullmatch(path) and (not rule.check or _looks(rule.check, path, status, folder_fd)):
                return rule
        return None


def _looks(check: Check, path: bytes, status: os.stat_result, folder_fd: int) -> bool:
    if not stat.S_ISREG(status.st_mode):
        return False
    begin = beginning(folder_fd, path.rpartition(b"/")[2])
    if check == "core":
        return is_core(begin)
    return (_KEY if check == "key" else _TOKEN).search(begin) is not None


def beginning(folder_fd: int, name: bytes, size: int = LOOK_BYTES) -> bytes:
    """The first bytes of a regular file; empty if it is none, or cannot be read."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError:
        return b""
    try:
        return os.read(fd, size) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def is_core(begin: bytes) -> bool:
    """ELF with e_type ET_CORE."""
    return begin[:4] == b"\x7fELF" and len(begin) >= 18 and int.from_bytes(begin[16:18], "big" if begin[5] == 2 else "little") == 4


def _union(patterns: Sequence[str]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(_translate(os.fsencode(one)) for one in patterns), re.DOTALL)


_SPECIAL = re.compile(rb"\*\*/|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)


def _translate(pattern: bytes) -> bytes:
    """A regular expression for the whole path."""
    out = b""
    if pattern == b"~" or pattern.startswith(b"~/"):
        out, pattern = rb"(?:/root|/home/[^/]+)", pattern[1:]
    elif not pattern.startswith((b"/", b"**")):
        pattern = b"/" + pattern
    elif pattern.startswith(b"**"):
        out = b"/"
    for match in _SPECIAL.finditer(pattern.rstrip(b"/")):
        part = match.group()
        if part == b"**/":
            out += rb"(?:[^/]+/)*"
        elif part == b"**":
            out += b".*"
        elif part == b"*":
            out += rb"[^/]*"
        elif part == b"?":
            out += rb"[^/]"
        elif part.startswith(b"[") and len(part) > 1:
            negated = part[1:2] == b"!"
            inner = part[2 if negated else 1 : -1].replace(b"\\", b"\\\\").replace(b"^", b"\\^").replace(b"[", b"\\[").replace(b"]", b"\\]")
            out += b"[" + (b"^/" if negated else b"") + inner + b"]"
        else:
            out += re.escape(part)
    return b"(?:" + out + b")"
