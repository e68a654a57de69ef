# SPDX-License-Identifier: Apache-2.0
"""What an image or a layer holds that would give an answer away: a warning each, nothing is changed.

    git.*           history that HEAD does not lead to: later commits, branches, reflogs, stashes (see `gitdir`)
    cache.*         archives and caches that hold one of `packages`, the packages whose source is the answer
    site.newer      an installed package that is newer than the workspace's own
    leftover.*      .orig, .rej, .patch files of a workspace
    credentials …   what `scrub` would have left out, where it has not been run

Everything is read through a read-only mount of the layers, by descriptor; all of it is hostile, so all of it is bounded.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence

from opendsec.api.images import Finding, LintReport
from opendsec.images.gitdir import Ref, Repository
from opendsec.images.packages import Packages
from opendsec.images.scrub import RULES, Matcher, Scrub
from opendsec.images.store import ImageStore
from opendsec.images.view import merged, opened

MAX_ENTRIES = 3_000_000
MAX_FINDINGS = 1000
MAX_PATH = 3800
SHOWN = 5  # names in one message

_SKIPPED = frozenset((b"proc", b"sys", b"dev"))
_SYSTEM = (b"usr/", b"lib/", b"etc/", b"var/", b"bin/", b"sbin/", b"boot/")
_LEFTOVER = re.compile(rb".*\.(?:orig|rej|patch|diff)")
_WITHOUT_SCRUB = ("scrub.history", "scrub.credentials", "scrub.credentials.key", "scrub.credentials.token", "scrub.core", "scrub.agent")


def lint(store: ImageStore, name: str, packages: Sequence[str] = ()) -> LintReport:
    """What the image or layer `name` (also a digest) holds. Blocking, for a thread. Raises NotFound, Internal."""
    return LintReport(name=name, findings=tuple(lint_layers(store, store.digests_of(name), packages)))


def lint_layers(store: ImageStore, digests: Sequence[str], packages: Sequence[str] = (), *, of: str = "") -> list[Finding]:
    """As `lint`, of these layers together. `of`: tell only of paths that this one of them has."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(merged([store.layer_ref(digest) for digest in digests]))
        layer = stack.enter_context(merged([store.layer_ref(of)])) if of else -1
        linter = _Linter(root, layer, packages)
        linter.walk()
        return linter.findings


class _Linter:
    def __init__(self, root: int, layer: int, packages: Sequence[str]) -> None:
        self.root, self.layer = root, layer
        self.packages = Packages(packages)
        self.findings: list[Finding] = []
        self.matcher = Matcher(Scrub(), [rule for rule in RULES if rule.name in _WITHOUT_SCRUB])

    def found(self, rule: str, path: bytes, message: str, size: int = 0) -> None:
        if len(self.findings) < MAX_FINDINGS:
            shown = "/" + path[:1000].decode(errors="backslashreplace")
            self.findings.append(Finding(rule=rule, path=shown, message=message, bytes=size))
        elif len(self.findings) == MAX_FINDINGS:
            self.findings.append(Finding(rule="lint.more", path="/", message=f"more than {MAX_FINDINGS} findings"))

    def walk(self) -> None:
        """All of the tree, or of the one layer: a directory that it has a part of is looked at as a whole where that matters."""
        pending, count = [b""], 0
        while pending:
            path = pending.pop()
            if len(path) > MAX_PATH:
                self.found("lint.too_deep", path, "what is below was not looked at")
                continue
            with contextlib.ExitStack() as stack:
                try:
                    fd = whole = stack.enter_context(opened(self.root if self.layer < 0 else self.layer, path))
                    if self.layer >= 0:
                        whole = stack.enter_context(opened(self.root, path))
                except OSError:
                    continue  # hidden by a higher layer
                with os.scandir(fd) as entries:
                    listing = {os.fsencode(entry.name): entry for entry in entries}
                count += len(listing)
                if count > MAX_ENTRIES:
                    self.found("lint.too_large", b"", f"more than {MAX_ENTRIES} files: the others were not looked at")
                    break
                if _is_git(whole):
                    self._git(path, whole)
                    pending += [_join(path, name) for name in (b"modules",) if name in listing]
                    continue
                self.packages.project(whole, path)
                for name, entry in sorted(listing.items(), reverse=True):
                    below = _join(path, name)
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            if path or name not in _SKIPPED:
                                pending.append(below)
                            self._directory(below, name, status, fd)
                        elif stat.S_ISREG(status.st_mode):
                            self._file(below, name, status, fd)
        for path, message in self.packages.newer():
            self.found("site.newer", path, message)

    def _directory(self, path: bytes, name: bytes, status: os.stat_result, fd: int) -> None:
        rule = self.matcher.rule(b"/" + path, status, fd)
        if rule is not None:
            self.found(rule.name.removeprefix("scrub."), path, rule.reason)
        if kind := self.packages.directory(path, name):
            self.found(kind, path, "holds a package whose source is the answer")

    def _file(self, path: bytes, name: bytes, status: os.stat_result, fd: int) -> None:
        rule = self.matcher.rule(b"/" + path, status, fd)
        if rule is not None:
            self.found(rule.name.removeprefix("scrub."), path, rule.reason, status.st_size)
        elif _LEFTOVER.fullmatch(name) and not path.startswith(_SYSTEM):
            self.found("leftover.patch", path, "left by patch or merge tools: it may be the change that is asked for", status.st_size)
        if kind := self.packages.file(path, name, fd):
            self.found(kind, path, "holds a package whose source is the answer", status.st_size)

    # --- git -----------------------------------------------------------------------------------------------------------

    def _git(self, path: bytes, fd: int) -> None:
        repository = Repository(fd).read()
        for problem in repository.problems[:SHOWN]:
            self.found("git.unreadable", path, problem)
        if repository.alternates:
            self.found("git.alternates", path, "its objects lie elsewhere too: they were not looked at")
        if repository.worktrees:
            self.found("git.worktrees", path, f"has worktrees: {_few(repository.worktrees)}")
        if repository.head is None:
            if repository.commits:
                self.found("git.no_head", path, f"HEAD leads to no commit, and there are {len(repository.commits)}")
            return
        known = repository.ancestors(repository.head)
        head = repository.commits.get(repository.peeled(repository.head))
        if head is None:
            self.found("git.unreadable", path, "HEAD's commit is not there")
            return

        def beyond(refs: Sequence[Ref]) -> list[str]:
            return list(
                dict.fromkeys(
                    ref.name for ref in refs if (name := repository.peeled(ref.target)) in repository.commits and name not in known
                )
            )

        for rule, refs, what in (
            ("git.refs_ahead", beyond([ref for ref in repository.refs if ref.name != "refs/stash"]), "lead to commits that HEAD does not"),
            ("git.stash", beyond([ref for ref in repository.refs if ref.name == "refs/stash"]), "holds changes put aside"),
            ("git.reflog", beyond(repository.reflogs), "have entries of commits that HEAD does not lead to"),
            ("git.special", beyond(repository.special), "name commits that HEAD does not lead to"),
        ):
            if refs:
                self.found(rule, path, f"{_few(refs)} {what}")
        others = {name: commit for name, commit in repository.commits.items() if name not in known}
        newer = sorted((name for name, commit in others.items() if commit.time > head.time), key=lambda name: -others[name].time)
        if newer:
            self.found("git.newer_objects", path, f"{len(newer)} commits later than HEAD: {_few([name[:12].decode() for name in newer])}")
        unreachable = others.keys() - repository.ancestors(*(ref.target for ref in repository.refs))
        if unreachable:
            few = _few([name[:12].decode() for name in sorted(unreachable)])
            self.found("git.unreachable", path, f"{len(unreachable)} commits that no branch and no tag leads to: {few}")


def _is_git(fd: int) -> bool:
    try:
        os.stat("HEAD", dir_fd=fd, follow_symlinks=False)
        return all(stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) for name in ("objects", "refs"))
    except OSError:
        return False


def _join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def _few(items: Sequence[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
