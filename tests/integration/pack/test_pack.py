# SPDX-License-Identifier: Apache-2.0
"""Packing a living sandbox: what becomes a layer, what a sandbox made of it sees, and that the first one goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, QuotaExceeded, Unavailable, Unsupported
from opendsec.api.images import PackRequest, PackResult
from opendsec.edge.packing import pack
from opendsec.kernel import mounts
from tests.images import BASE
from tests.nodes import NodeEdge

pytestmark = pytest.mark.slow

ON_BOTH = pytest.mark.parametrize("edge", ["btrfs", "tmpfs"], indirect=True)

# Every entry below a directory: kind, mode, owner, size, links, target, attributes, content.
SEE = r"""
import hashlib, os, stat, sys
def walk(path):
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    size = status.st_size if kind == stat.S_IFREG else 0
    target = os.readlink(path) if kind == stat.S_IFLNK else ""
    content = hashlib.sha256(open(path, "rb").read()).hexdigest()[:12] if kind == stat.S_IFREG else ""
    names = sorted(os.listxattr(path, follow_symlinks=False))
    links = status.st_nlink if kind != stat.S_IFDIR else 0
    print(os.fsencode(path), oct(status.st_mode), status.st_uid, status.st_gid, size, links, target, names, content)
    if kind == stat.S_IFDIR:
        for name in sorted(os.listdir(path)):
            walk(os.path.join(path, name))
for path in sys.argv[1:]:
    walk(path)
"""


async def see(edge: NodeEdge, box: str, *paths: str) -> list[str]:
    return (await edge.sh(box, f"python3 -ISc '{SEE}' {' '.join(paths)}".replace("'\n", "'\n", 1))).splitlines()


async def packed(edge: NodeEdge, box: str, name: str = "task@1", **fields: object) -> PackResult:
    return await pack(edge.node, box, PackRequest(name=name, **{"scrub": False, **fields}))  # type: ignore[arg-type]


async def test_what_was_written_is_there_in_a_new_sandbox(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, "mkdir -p /workspace && echo hello >/workspace/a && rm /etc/debian_version")
    await edge.sh(box, "chown 33:44 /workspace/a && chmod 4750 /workspace/a")
    result = await packed(edge, box)
    assert await edge.sh(box, "cat /workspace/a") == "hello\n"
    assert result.image.name == "task:1" and result.layer.names == ("workspace:task@1",)
    assert result.image.layers == (*edge.node.box(box).template.layers, result.layer.digest)
    again = await edge.create("task:1")
    assert await edge.sh(again, "stat -c '%a %u:%g %F' /workspace/a; cat /workspace/a") == "4750 33:44 regular file\nhello\n"
    assert (await edge.run(again, "ls /etc/debian_version")).exit_code == 2
    composed = await edge.create(BASE, layers=["workspace:task@1"])
    assert await edge.sh(composed, "cat /workspace/a") == "hello\n"


HAZARDS = r"""
set -e
mkdir -p /w/deep/a/b /w/sticky /w/empty && cd /w
printf x >one && ln one two && ln one deep/a/b/three
ln -s /etc/passwd absolute && ln -s ../../../../etc/shadow climbing && ln -s nowhere dangling
mkfifo pipe
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/w/socket")'
truncate -s 40M sparse && printf end >>sparse
chmod 1777 sticky; chmod 2755 empty; printf '#!/bin/sh\n' >suid; chmod 6755 suid
chown 1000:1001 suid; chmod 6755 suid
chown 65535:65534 one
python3 -c 'import os; os.mkdir(b"/w/caf\xe9\n"); open(b"/w/"+b"n"*254,"w").close()'
python3 -c 'import os; os.setxattr("/w/one","user.note",b"v"); os.setxattr("/w","user.overlay.opaque",b"y")'
python3 -c 'import os; os.setxattr("/w/deep","user.overlay.redirect",b"/etc")'
cp /bin/true capable
python3 -c 'import os,struct; os.setxattr("/w/capable","security.capability",struct.pack("<IIIII",0x02000001,1<<10,0,0,0))'
rm -r /usr/share/doc && mkdir /usr/share/doc && echo mine >/usr/share/doc/mine
mv /usr/share/perl5 /usr/share/moved && echo new >/usr/share/moved/new && rm /usr/share/moved/Debian/*.pm 2>/dev/null || true
mv /usr/lib/python3/dist-packages /usr/lib/python3/away && mv /usr/lib/python3/away /w/away
rm -rf /usr/share/common-licenses/GPL-1 /usr/share/common-licenses/GPL-2 /usr/share/bug
touch /etc/passwd
"""


@ON_BOTH
async def test_hazards_come_back_as_they_were(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, HAZARDS)
    places = ("/w", "/usr/share", "/usr/lib/python3", "/etc")
    before = await see(edge, box, *places)
    result = await packed(edge, box)
    again = await edge.create("task:1")
    after = await see(edge, again, *places)
    gone = [line for line in before if line not in after]
    assert all("socket" in line or "user.overlay." in line for line in gone), gone
    assert len(gone) == 3 and len(before) - len(after) == 1
    assert any("user.note" in line for line in after) and not any("user.overlay" in line for line in after)
    # The layer holds no mark of the overlay that it came from.
    ref = edge.store.layer_ref(result.layer.digest)
    fd = mounts.mount_erofs(ref.meta, ref.data)
    try:
        marks = await asyncio.to_thread(lambda: set(_attributes(fd)))
        moved = os.open("usr/share/moved", os.O_RDONLY, dir_fd=fd)
        assert len(os.listdir(moved)) > 1  # a renamed directory is whole in the layer, whatever that is put on
        os.close(moved)
    finally:
        os.close(fd)
    assert {name for name, _ in marks if name.startswith("trusted.")} == {"trusted.overlay.opaque"}


def _attributes(fd: int) -> list[tuple[str, str]]:
    found = []
    for folder, _, names, here in os.fwalk(".", dir_fd=fd):
        for name in (".", *names):
            path = f"/proc/self/fd/{here}/{name}"
            found += [(one, os.path.join(folder, name)) for one in os.listxattr(path, follow_symlinks=False)]
    return found


RESIDUE = r"""
set -e
mkdir -p /root/.cache/pip /root/.ssh /root/.aws /work/.claude /home/dev /var/tmp/x /root/.config/gh
echo ls >/root/.bash_history; echo x >/home/dev/.python_history; head -c 5000 /dev/zero >/root/.cache/pip/blob
printf -- '-----BEGIN RSA PRIVATE KEY-----' >/root/.ssh/id_rsa; echo host >/root/.ssh/known_hosts; echo k >/root/.aws/credentials
echo t >/tmp/t; mkfifo /tmp/pipe; echo v >/var/tmp/x/v; echo chat >/work/.claude/chat; echo s >/work/.a.py.swp; echo a >/work/a.py
echo '_authToken=1' >/work/.npmrc; mkdir /work/sub; echo 'registry=x' >/work/sub/.npmrc; echo oauth >/root/.config/gh/hosts.yml
echo keep >/work/.claude/settings.json; echo changed >/etc/machine-id; echo 'nameserver 1.2.3.4' >/etc/resolv.conf
echo mine >/work/mine.secret; rm /var/lib/dpkg/status-old 2>/dev/null || true
"""


async def test_scrubbing(edge: NodeEdge) -> None:
    box = await edge.create()
    before = await edge.sh(box, "cat /etc/machine-id 2>&1 || true; ls -A /tmp")
    await edge.sh(box, RESIDUE)
    result = await packed(edge, box, scrub=True, scrub_paths=("/**/*.secret",), keep_paths=("/work/.claude/settings.json",))
    removed: dict[str, set[str]] = {}
    for finding in result.scrubbed:
        assert finding.message
        removed.setdefault(finding.rule, set()).add(finding.path)
    assert removed == {
        "scrub.history": {"/root/.bash_history", "/home/dev/.python_history"},
        "scrub.cache.python": {"/root/.cache/pip/blob"},
        "scrub.credentials": {"/root/.aws/credentials", "/root/.config/gh/hosts.yml"},
        "scrub.credentials.key": {"/root/.ssh/id_rsa"},
        "scrub.credentials.token": {"/work/.npmrc"},
        "scrub.temporary": {"/tmp/t", "/tmp/pipe", "/var/tmp/x/v"},
        "scrub.agent": {"/work/.claude/chat"},
        "scrub.editor": {"/work/.a.py.swp"},
        "scrub.machine": {"/etc/machine-id", "/etc/resolv.conf"} & removed["scrub.machine"],
        "scrub.asked": {"/work/mine.secret"},
    }
    assert next(finding.bytes for finding in result.scrubbed if finding.path.endswith("blob")) == 5000
    again = await edge.create("task:1")
    assert await edge.sh(again, "cat /etc/machine-id 2>&1 || true; ls -A /tmp") == before  # what is below shows again
    left = await edge.sh(again, "find /work /root/.cache /root/.ssh /root/.aws /var/tmp /home -type f; stat -c %a /tmp")
    assert sorted(left.split()) == ["/root/.ssh/known_hosts", "/work/.claude/settings.json", "/work/a.py", "/work/sub/.npmrc", "1777"]
    assert await edge.sh(box, "cat /root/.bash_history /tmp/t") == "ls\nt\n"  # the sandbox itself keeps all


async def test_scrubbing_brings_nothing_back_that_the_sandbox_had_removed(edge: NodeEdge) -> None:
    first = await edge.create()
    await edge.sh(first, "mkdir -p /root/.aws /work/.claude && echo old >/root/.aws/credentials && echo old >/work/.claude/chat")
    await packed(edge, first, "low@1")
    second = await edge.create("low:1")
    await edge.sh(
        second, "rm -r /root/.aws && mkdir /root/.aws && echo new >/root/.aws/credentials; rm /work/.claude/chat; rm -r /tmp/* || true"
    )
    await packed(edge, second, "high@1", scrub=True)
    third = await edge.create("high:1")
    assert (await edge.run(third, "ls /root/.aws /work/.claude/chat")).exit_code == 2
    # A directory that was only added to is as below again.
    fourth = await edge.create("low:1")
    await edge.sh(fourth, "echo more >/root/.aws/config")
    await packed(edge, fourth, "other@1", scrub=True)
    assert await edge.sh(await edge.create("other:1"), "ls /root/.aws") == "credentials\n"


async def test_warnings_can_fail_it(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(
        box,
        "git config --global user.email a@b; git config --global user.name a; git init -q /work",
    )
    await edge.sh(
        box,
        "cd /work; git commit -q --allow-empty -m 1; git commit -q --allow-empty -m answer; git reset -q --hard HEAD~1",
    )
    await edge.sh(box, "echo 1 >/work/numpy-2.0.tar.gz")
    with pytest.raises(Conflict) as error:
        await packed(edge, box, packages=("numpy",), fail_on_warnings=True)
    assert error.value.field == "fail_on_warnings" and error.value.data["warnings"]
    assert not any(image.name == "task:1" for image in edge.store.list().images)
    result = await packed(edge, box, packages=("numpy",))
    rules = {finding.rule for finding in result.warnings}
    assert {"git.reflog", "git.unreachable", "git.special", "cache.package"} <= rules
    assert all(finding.path.startswith("/work/") for finding in result.warnings)


@pytest.mark.parametrize(
    "change",
    [
        """python3 -c 'import os\nfor i in range(30): os.setxattr("/f", "user.%d" % i, b"x" * 70)'""",
        """python3 -c 'import os; os.setxattr("/f", "user." + "n" * 240, b"")'""",
        """python3 -c 'import os; os.setxattr("/f", "btrfs.compression", b"zlib")' || true""",
        """python3 -c 'import os; os.symlink("a" * 4095, "/l")'""",
        "chmod 700 /; chown 5:5 /",
        "mkdir /m; cd /m; seq 3000 | xargs touch",
    ],
    ids=["attributes", "attribute's name", "another file system's", "long link", "root", "many"],
)
async def test_what_hostile_sandboxes_make_is_packed(edge: NodeEdge, change: str) -> None:
    box = await edge.create()
    await edge.sh(box, f"touch /f; {change}")
    before = await see(edge, box, "/f", "/m" if "/m" in change else "/etc/passwd")
    await packed(edge, box)
    again = await edge.create("task:1")
    lines = await see(edge, again, "/f", "/m" if "/m" in change else "/etc/passwd")
    assert [line.replace("'btrfs.compression'", "") for line in before] == lines
    assert await edge.sh(again, "stat -c '%a %u' /") == "755 0\n"  # the root directory is each sandbox's own


DEEP = 'python3 -c \'import os\nfor i in range(3000):\n os.mkdir("ddd"); os.chdir("ddd")\''


@ON_BOTH
async def test_what_cannot_be_packed_is_refused_and_the_sandbox_goes_on(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, f"cd /tmp; {DEEP}")
    if edge.driver == "btrfs":
        await packed(edge, box, scrub=True)  # whatever its depth, it is out of the way by one renaming
    with pytest.raises((Unsupported, Unavailable), match=r"too deep|cannot copy"):
        await packed(edge, box)
    await edge.sh(box, """cd /; rm -r /tmp/ddd; python3 -c 'open("/" + "n" * 255, "w")'""")
    with pytest.raises(Unsupported, match="255 bytes"):
        await packed(edge, box)
    await edge.sh(box, "rm /nnn*")
    await packed(edge, box)
    assert edge.snapshots == []


async def test_access_lists_survive_also_in_a_renamed_directory(edge: NodeEdge) -> None:
    acl = """python3 -c 'import os, struct, sys
entry = lambda tag, perm, number: struct.pack("<HHI", tag, perm, number)
acl = struct.pack("<I", 2) + entry(1, 6, 2**32 - 1) + entry(2, 4, 1000) + entry(4, 4, 2**32 - 1) + entry(16, 4, 2**32 - 1)
os.setxattr("/w/f", "system.posix_acl_access", acl + entry(32, 0, 2**32 - 1))'"""
    show = """python3 -c 'import os, sys; print(os.getxattr(sys.argv[1], "system.posix_acl_access").hex())' """
    first = await edge.create()
    await edge.sh(first, f"mkdir /w; touch /w/f; {acl}")
    expected = await edge.sh(first, show + "/w/f")
    await packed(edge, first, "first@1")
    second = await edge.create("first:1")
    assert await edge.sh(second, show + "/w/f") == expected
    await edge.sh(second, "mv /w /moved")
    await packed(edge, second, "second@1")
    assert await edge.sh(await edge.create("second:1"), show + "/moved/f") == expected


@ON_BOTH
async def test_equal_changes_are_one_layer(edge: NodeEdge) -> None:
    digests = []
    for _ in range(2):
        box = await edge.create()
        await edge.sh(box, "rm /etc/issue /etc/issue.net; mkdir /w; echo 1 >/w/1; ln /w/1 /w/2")
        digests.append((await packed(edge, box)).layer.digest)
    assert digests[0] == digests[1]


@ON_BOTH
async def test_python_of_a_packed_layer_is_compiled_and_can_write_its_byte_code_beside_the_sources(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, "mkdir -p /w/fresh && cd /w && echo x=1 >a.py && echo y=2 >fresh/b.py && python3 -c 'import a' && ls __pycache__")
    await packed(edge, box)
    again = await edge.create("task:1")
    said = await edge.sh(again, "cd /w && python3 -vc 'import a' 2>&1")
    assert "matches /w/a.py" in said and "wrote" not in said
    assert (await edge.sh(again, "cd /w/fresh && python3 -c 'import b' && ls __pycache__")).startswith("b.cpython")
    assert (await edge.sh(again, "cd /w && echo x=3 >>a.py && python3 -c 'import a; print(a.x)'")) == "3\n"


@ON_BOTH
async def test_a_layer_that_claims_more_than_the_disk_is_refused(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, "truncate -s 1T /hole")
    with pytest.raises(QuotaExceeded, match="sparse"):
        await packed(edge, box)
    assert await edge.sh(box, "rm /hole; echo on") == "on\n"
    await packed(edge, box)
    assert edge.snapshots == []


async def test_a_sandbox_is_packed_at_one_moment(edge: NodeEdge) -> None:
    """Two files that a program always writes one after the other are never further apart than that."""
    box = await edge.create()
    script = "i=0; while :; do i=$((i+1)); echo $i >/first; echo $i >/second; done"
    running = asyncio.ensure_future(edge.run(box, script))
    while (await edge.run(box, "test -s /second")).exit_code:
        pass
    for number in range(3):
        await packed(edge, box, f"task@{number}")
    await edge.kill(box)
    await asyncio.wait((running,))
    for number in range(3):
        again = await edge.create(f"task:{number}")
        first, second = (await edge.sh(again, "cat /first; echo :; cat /second")).replace("\n", "").split(":")
        assert not first or not second or 0 <= int(first) - int(second) <= 1


async def test_what_is_refused_is_refused_before_anything_stands_still(edge: NodeEdge) -> None:
    box = await edge.create()
    for request, field in (
        (PackRequest(name="plain"), "name"),
        (PackRequest(name="Upper@1"), "name"),
        (PackRequest(name="x@"), "name"),
        (PackRequest(name="x@1", keep_paths=("relative",)), "keep_paths[0]"),
        (PackRequest(name="x@1", scrub_paths=("/" * 2000,)), "scrub_paths[0]"),
    ):
        with pytest.raises(InvalidRequest) as error:
            await pack(edge.node, box, request)
        assert error.value.field == field


async def test_the_same_action_packs_once(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, "echo 1 >/a")
    request = PackRequest(name="task@1", scrub=False, action_id="pack-1")
    first, second = await asyncio.gather(pack(edge.node, box, request), pack(edge.node, box, request))
    await edge.sh(box, "echo 2 >/a")
    third = await pack(edge.node, box, request)
    assert first == second == third
    with pytest.raises(Conflict):
        await pack(edge.node, box, PackRequest(name="task@2", scrub=False, action_id="pack-1"))


@ON_BOTH
async def test_cancelled_it_leaves_nothing_and_the_sandbox_runs(edge: NodeEdge) -> None:
    box = await edge.create()
    await edge.sh(box, "head -c 30M /dev/urandom >/big")
    for turns in (1, 3, 10, 40):
        packing = asyncio.ensure_future(packed(edge, box))
        for _ in range(turns):
            await asyncio.sleep(0)
        packing.cancel()
        await asyncio.wait((packing,))
        assert packing.cancelled()
        assert await edge.sh(box, "echo on") == "on\n"
    assert edge.snapshots == [] and os.listdir(edge.store.root / "tmp") == []
    assert not any(image.name == "task:1" for image in edge.store.list().images)


@ON_BOTH
async def test_an_edge_that_died_in_between_leaves_a_sandbox_that_the_next_one_thaws(edge: NodeEdge) -> None:
    box = await edge.create()
    handle = edge.node.box(box).handle
    assert handle is not None
    snapshot = await handle.snapshot_disk()
    await handle.freeze()
    await edge.stop()
    assert Path(snapshot.upper).exists()
    await edge.start()
    assert await edge.sh(box, "echo on") == "on\n"
    assert edge.snapshots == []


async def test_a_frozen_sandbox_can_be_ended(edge: NodeEdge) -> None:
    box = await edge.create()
    handle = edge.node.box(box).handle
    assert handle is not None
    await handle.freeze()
    await edge.kill(box)
    assert edge.node.box(box).state.phase == "killed" or not edge.node.box(box).state.held
