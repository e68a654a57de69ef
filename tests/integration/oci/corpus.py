# SPDX-License-Identifier: Apache-2.0
"""Image layers with every hazard, alone and together, and where what we make of them differs from what `umoci unpack` does.

`differs` maps "path: field" (or "path" for one that is on one side alone) to the reason. A test fails for a difference that is not
here, and for one that is here and is none.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.oci_layouts import archive, entry, folder, hard_link, symlink

ROOT_BY_UMOCI = "umoci gives a root that no layer has an entry for the time of the epoch; ours is 2000-01-01"
NOW_BY_UMOCI = "umoci gives directories that the archive does not have the time of unpacking; ours is that below, or 2000-01-01"
DEVICES = "devices are left out: a sandbox could not open them, and has those it needs"
ATTRIBUTES = "attributes other than user.* and security.capability are left out"
EMPTY_VALUE = "an attribute with an empty value: Go's tar reader takes it for none"
TOUCHED = "umoci takes away what the whiteout hides after it has set the directory's time"
NO_TYPE_S = "umoci 0.4.7 knows no entries of type S"
NO_ZSTD = "umoci 0.4.7 knows no zstd"
NO_GLOBAL = "umoci 0.4.7 knows no global pax headers"


@dataclass(frozen=True)
class Case:
    layers: Sequence[bytes]
    differs: Mapping[str, str] = field(default_factory=dict)
    pack: str = "gzip"
    refused: str = ""  # we refuse it, and say so; `umoci_takes` tells whether umoci does not
    umoci_takes: str = ""  # why we refuse what umoci takes
    umoci_refuses: str = ""  # what umoci cannot read, so that it gets …
    umoci_gets: Sequence[bytes] = ()  # … the same image said in another way
    notes: Sequence[str] = ()


def header(name: bytes, kind: bytes, size: int, **fields: bytes) -> bytearray:
    """A GNU header by hand."""
    block = bytearray(512)
    block[0 : len(name)] = name
    for at, value in (
        (100, b"0000644\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, b"%011o\0" % size),
        (136, b"%011o\0" % 1_600_000_000),
    ):
        block[at : at + len(value)] = value
    block[156:157] = kind
    block[257:265] = b"ustar  \0"
    for key, value in fields.items():
        at = int(key[1:])
        block[at : at + len(value)] = value
    return sealed(block)


def sealed(block: bytearray) -> bytearray:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def gnu_sparse() -> bytes:
    """2 MiB with data at 0 and at 1 MiB."""
    pairs = b"".join(b"%011o\0%011o\0" % pair for pair in ((0, 600), (1 << 20, 512), (2 << 20, 0)))
    return bytes(header(b"sparse", b"S", 1112, _386=pairs, _483=b"%011o\0" % (2 << 20))) + padded(b"a" * 600 + b"b" * 512)


def gnu_sparse_extended() -> bytes:
    """More pieces than fit in the header."""
    pieces = [(number * 8192, 512) for number in range(12)]
    first = b"".join(b"%011o\0%011o\0" % piece for piece in pieces[:4])
    more = b"".join(b"%011o\0%011o\0" % piece for piece in pieces[4:]).ljust(512, b"\0")
    size = 512 * len(pieces)
    head = bytes(header(b"pieces", b"S", size, _386=first, _482=b"\1", _483=b"%011o\0" % (13 * 8192)))
    return head + more + padded(b"".join(bytes([65 + number]) * 512 for number in range(12)))


def pax_sparse(version: str) -> tuple[tarfile.TarInfo, bytes]:
    content = b"x" * 1000 + b"y" * 24
    pairs = [(4096, 1000), (1 << 20, 24)]
    flat = [str(number) for pair in pairs for number in pair]
    size = str(3 << 20)
    if version == "0.1":
        pax = {"GNU.sparse.size": size, "GNU.sparse.numblocks": "2", "GNU.sparse.map": ",".join(flat), "GNU.sparse.name": "sparse"}
        return entry("stand-in", content, pax=pax)
    text = ("\n".join(["2", *flat]) + "\n").encode()
    return entry(
        "GNUSparseFile.0/sparse",
        padded(text) + content,
        pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "sparse", "GNU.sparse.realsize": size},
    )


def pax_sparse_0_0() -> bytes:
    """Keys repeat, which no dictionary can say."""
    records = [("GNU.sparse.size", str(3 << 20)), ("GNU.sparse.numblocks", "2")]
    for offset, count in ((4096, 1000), (1 << 20, 24)):
        records += [("GNU.sparse.offset", str(offset)), ("GNU.sparse.numbytes", str(count))]
    body = b"".join(record(key, value) for key, value in records)
    return archive(bytes(header(b"pax", b"x", len(body))) + padded(body), entry("sparse", b"x" * 1000 + b"y" * 24))


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    size = len(rest) + 1
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


def v7(name: bytes, content: bytes = b"") -> bytes:
    block = header(name, b"\0", len(content))
    block[257:265] = bytes(8)
    return bytes(sealed(block)) + padded(content)


CAPABILITY = b"\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00".decode("utf-8", "surrogateescape")
BASE = archive(
    folder("etc"),
    entry("etc/a", b"1"),
    entry("etc/b", b"2"),
    folder("var"),
    folder("var/lib", 0o700, uid=7, gid=8),
    entry("var/lib/x", b"3"),
    folder("var/lib/deep"),
    entry("var/lib/deep/y", b"4"),
    folder("tmp", 0o1777),
    folder("usr"),
    folder("usr/lib"),
    entry("usr/lib/z", b"5"),
    symlink("lib", "usr/lib"),
)


def dense(name: str) -> tuple[tarfile.TarInfo, bytes]:
    """The file that `gnu_sparse` or `gnu_sparse_extended` says, in full."""
    if name == "pieces":
        content = bytearray(13 * 8192)
        for number in range(12):
            content[number * 8192 : number * 8192 + 512] = bytes([65 + number]) * 512
    else:
        content = bytearray(2 << 20)
        content[:600], content[1 << 20 : (1 << 20) + 512] = b"a" * 600, b"b" * 512
    return entry(name, bytes(content))


def everything(sparse: bytes | tuple[tarfile.TarInfo, bytes], *, noise: int = 0) -> list[bytes]:
    """`noise`: so many bytes that do not pack, which keep neighbours from being made one."""
    return [
        BASE,
        archive(
            folder("./", 0o755, mtime=99),
            entry("etc/.wh.a"),
            entry("etc/\udcffname", b"x", pax={"SCHILY.xattr.user.k": "v", "mtime": "1400000000.5"}),
            hard_link("usr/lib/" + "l" * 120, "etc/\udcffname"),
            entry("var/.wh.lib"),
            entry("var/lib/deep/again", b"x", mode=0o4755, uid=12),
            folder("var/lib/deep"),
            folder("var/lib"),
            entry("lib/through", b"y"),
            sparse,
            folder("dev"),
            entry("dev/zero", kind=tarfile.CHRTYPE, device=(1, 5)),
            entry("tmp/p", kind=tarfile.FIFOTYPE),
            hard_link("tmp/.wh.gone", "etc/.wh.a"),
            symlink("etc/b", "a"),
            entry("etc/b", b"replaced"),
            entry("noise", random.Random(1).randbytes(noise)),
        ),
        archive(
            entry("sparse", b"short"),
            entry("etc/.wh..wh..opq"),
            entry("etc/last", b"z"),
            entry("noise", random.Random(2).randbytes(noise)),
        ),
    ]


CASES: dict[str, Case] = {
    "plain": Case([archive(folder("d", 0o711), entry("d/f", b"content", mode=0o640), entry("e", b"", mode=0o400))]),
    "owners": Case([archive(folder("d", uid=1000, gid=1001), entry("d/f", b"x", uid=65535, gid=65534), entry("g", gid=42))]),
    "id-too-large": Case(
        [archive(entry("f", uid=100_000))],
        refused="ids go up to 65535",
        umoci_takes="a sandbox has 65536 ids; a file of another would belong to nobody in it, silently",
    ),
    "setuid-and-sticky": Case(
        [archive(entry("s", b"x", mode=0o4755), entry("g", b"x", mode=0o2755, gid=5), folder("t", 0o1777), folder("d", 0o2775, gid=3))]
    ),
    "symlinks": Case([archive(symlink("a", "/etc/passwd"), symlink("b", "../../out"), symlink("c", "c"), symlink("d", "nowhere/" * 100))]),
    "hard-links": Case([archive(entry("f", b"one"), hard_link("g", "f"), hard_link("h", "g"), hard_link("i", "./f"))]),
    "hard-links-across-directories": Case(
        [
            archive(
                folder("a"),
                folder("b"),
                folder("b/c"),
                entry("a/f", b"one", mode=0o4711, uid=9),
                hard_link("b/c/g", "a/f"),
                hard_link("h", "b/c/g"),
            )
        ]
    ),
    "hard-link-to-symlink": Case([archive(symlink("s", "nowhere"), hard_link("t", "s"))]),
    "hard-link-to-what-comes-later": Case([archive(hard_link("g", "f"), entry("f", b"x"))], refused="not in the layer"),
    "hard-link-to-directory": Case([archive(folder("d"), hard_link("g", "d"))], refused="hard link to a directory"),
    "hard-link-then-replaced": Case([archive(entry("f", b"one"), hard_link("g", "f"), entry("f", b"two"))]),
    "hard-link-into-lower-layer": Case(
        [archive(folder("big"), entry("big/f", b"one")), archive(hard_link("g", "big/f"))],
        refused="not in the layer",
        umoci_takes="between layers overlay could show a copy at best; Docker's overlay2 refuses it too",
    ),
    "hard-links-broken-above": Case(
        [archive(entry("f", b"one"), hard_link("g", "f")), archive(entry("g", b"two"))],
    ),
    "user-attributes": Case(
        [
            archive(
                entry("f", b"x", pax={"SCHILY.xattr.user.note": "hello", "SCHILY.xattr.user.empty": ""}),
                folder("d", pax={"SCHILY.xattr.user.d": "1"}),
            )
        ],
        differs={"f: xattrs": EMPTY_VALUE},
    ),
    "capability": Case([archive(entry("ping", b"x", mode=0o755, pax={"SCHILY.xattr.security.capability": CAPABILITY}))]),
    "other-attributes": Case(
        [
            archive(
                entry(
                    "f",
                    b"x",
                    pax={"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.trusted.mine": "1", "SCHILY.xattr.user.kept": "1"},
                )
            )
        ],
        differs={"f: xattrs": ATTRIBUTES},
        notes=["left out the attribute 'trusted.mine' of 'f'", "left out the attribute 'trusted.overlay.opaque' of 'f'"],
    ),
    "whiteout": Case([BASE, archive(entry("etc/.wh.a"))]),
    "whiteout-of-directory": Case([BASE, archive(entry("var/.wh.lib"))]),
    "whiteout-of-nothing": Case([BASE, archive(entry("etc/.wh.none"), folder("new"), entry("new/.wh.none"))]),
    "whiteout-of-link": Case([BASE, archive(entry(".wh.lib"))]),
    "opaque": Case([BASE, archive(folder("var"), entry("var/.wh..wh..opq"), folder("var/new"))]),
    "opaque-after-content": Case([BASE, archive(folder("var/lib", 0o711), entry("var/lib/new", b"n"), entry("var/lib/.wh..wh..opq"))]),
    "opaque-between": Case(
        [BASE, archive(entry("var/lib/n1"), entry("var/lib/.wh..wh..opq"), entry("var/lib/n2"), folder("var/lib/deep"))]
    ),
    "opaque-of-new-directory": Case([BASE, archive(folder("fresh"), entry("fresh/.wh..wh..opq"), entry("fresh/f", b"x"))]),
    "opaque-root": Case([BASE, archive(entry(".wh..wh..opq"), entry("only", b"x"))]),
    "whiteout-then-file": Case([BASE, archive(entry("etc/.wh.a"), entry("etc/a", b"new"))]),
    "file-then-whiteout": Case([BASE, archive(entry("etc/a", b"new"), entry("etc/.wh.a"))]),
    "whiteout-then-directory": Case([BASE, archive(entry("var/.wh.lib"), folder("var/lib", 0o755), entry("var/lib/new", b"n"))]),
    "directory-then-whiteout": Case(
        [BASE, archive(folder("var/lib", 0o755), entry("var/lib/new", b"n"), entry("var/.wh.lib"))], differs={"var/lib: mtime": TOUCHED}
    ),
    "whiteout-then-link": Case([BASE, archive(entry("var/.wh.lib"), symlink("var/lib", "../usr/lib"))]),
    "whiteout-as-hard-link": Case([BASE, archive(entry("etc/.wh.a"), hard_link("etc/.wh.b", "etc/.wh.a"))]),
    "opaque-as-hard-link": Case([BASE, archive(entry("etc/.wh.a"), hard_link("var/lib/.wh..wh..opq", "etc/.wh.a"))]),
    "whiteouts-of-odd-types": Case(
        [
            BASE,
            archive(
                folder("etc/.wh.a"),
                symlink("etc/.wh.b", "x"),
                entry("var/.wh.lib", kind=tarfile.FIFOTYPE),
                entry("usr/.wh.lib", b"with content"),
            ),
        ]
    ),
    "inside-a-whiteout": Case(
        [BASE, archive(entry(".wh.etc/a", b"x"))],
        refused="inside a whiteout",
        umoci_takes="names that begin with .wh. are reserved; umoci makes such a directory, which no layer of it could hold again",
    ),
    "aufs": Case(
        [archive(folder(".wh..wh.plnk"), entry(".wh..wh.aufs"), entry("f", b"x"))],
        notes=["left out '.wh..wh.aufs': aufs's own", "left out '.wh..wh.plnk/': aufs's own"],
    ),
    "devices": Case(
        [
            archive(
                folder("dev"),
                entry("dev/null", kind=tarfile.CHRTYPE, device=(1, 3)),
                entry("dev/sda", kind=tarfile.BLKTYPE, device=(8, 0)),
                entry("f", b"x"),
            )
        ],
        differs={"dev/null": DEVICES, "dev/sda": DEVICES},
        notes=["left out the device 'dev/null'", "left out the device 'dev/sda'"],
    ),
    "device-over-file": Case(
        [BASE, archive(entry("etc/a", kind=tarfile.CHRTYPE, device=(1, 3)), hard_link("etc/c", "etc/a"))],
        differs={"etc/a": DEVICES, "etc/c": DEVICES},
        notes=["left out the device 'etc/a'", "left out the device 'etc/c'"],
    ),
    "device-that-looks-like-a-whiteout": Case(
        [BASE, archive(entry("etc/a", kind=tarfile.CHRTYPE, device=(0, 0)))],
        differs={"etc/a": DEVICES},
        notes=["left out the device 'etc/a'"],
    ),
    "fifo": Case([archive(entry("p", kind=tarfile.FIFOTYPE, mode=0o622, uid=3))]),
    "sparse-gnu": Case(
        [archive(gnu_sparse(), entry("after", b"x"))], umoci_refuses=NO_TYPE_S, umoci_gets=[archive(dense("sparse"), entry("after", b"x"))]
    ),
    "sparse-gnu-extended": Case(
        [archive(gnu_sparse_extended(), entry("after", b"x"))],
        umoci_refuses=NO_TYPE_S,
        umoci_gets=[archive(dense("pieces"), entry("after", b"x"))],
    ),
    "sparse-0.0": Case([pax_sparse_0_0()]),
    "sparse-0.1": Case([archive(pax_sparse("0.1"), entry("after", b"x"))]),
    "sparse-1.0": Case([archive(pax_sparse("1.0"), entry("after", b"x"))]),
    "long-names": Case(
        [archive(folder("d" * 200), entry("d" * 200 + "/" + "e" * 255, b"x"), symlink("s", "t" * 3000), entry("n" * 101, b"y"))]
    ),
    "non-utf8-names": Case([archive(folder("d\udcff"), entry("d\udcff/\udc80\udcfe", b"x"), symlink("l", "\udcc0"), entry("é", b"y"))]),
    "v7-and-gnu": Case(
        [
            archive(
                v7(b"old", b"old"),
                v7(b"folder/"),
                bytes(header(b"././@LongLink", b"L", 151))
                + padded(b"l" * 150 + b"\0")
                + bytes(header(b"l" * 100, b"0", 2))
                + padded(b"ok"),
                bytes(header(b"base256", b"0", 0, _136=b"\x80\0\0\0\0\0\0\0\x60\0\0\0")),
            )
        ]
    ),
    "pax-headers": Case(
        [
            archive(
                bytes(header(b"global", b"g", len(record("comment", "hello")))) + padded(record("comment", "hello")),
                entry("f", b"x", pax={"comment": "nothing", "VENDOR.key": "value", "uid": "77"}),
            )
        ],
        umoci_refuses=NO_GLOBAL,
        umoci_gets=[archive(entry("f", b"x", uid=77))],
    ),
    "no-layers": Case([]),
    "empty-layers": Case([archive(), archive(), archive(entry("f", b"x")), archive()]),
    "duplicates": Case(
        [archive(entry("f", b"one"), entry("f", b"two", mode=0o600), folder("d", 0o700), entry("d/x", b"x"), folder("d", 0o711))]
    ),
    "duplicates-by-spelling": Case([archive(folder("./d/"), entry(".//d///x", b"one"), entry("d/./x", b"two"))]),
    "file-over-directory": Case([archive(folder("d"), entry("d/x", b"x"), entry("d", b"file"))]),
    "directory-over-file-over-link": Case(
        [archive(folder("real"), entry("real/x", b"x"), symlink("a", "real"), entry("a", b"file"), folder("a"), entry("a/y", b"y"))]
    ),
    "directory-over-link": Case([archive(folder("real"), symlink("a", "real"), folder("a", 0o700), entry("a/y", b"y"))]),
    "kinds-change-above": Case(
        [
            BASE,
            archive(entry("var", b"now a file"), folder("lib", 0o750), entry("lib/own", b"o"), symlink("etc", "usr"), folder("usr/lib/z")),
        ]
    ),
    "file-then-directory-above-directory": Case([BASE, archive(entry("var", b"f"), folder("var"), entry("var/n", b"n"))]),
    "parents-missing": Case(
        [archive(entry("a/b/c/f", b"x"))],
        differs={f"{path}: mtime": NOW_BY_UMOCI for path in ("a", "a/b", "a/b/c")},
    ),
    "parents-missing-above": Case([BASE, archive(entry("tmp/f", b"x"), entry("var/lib/deep/n", b"x"))]),
    "attributes-of-directory-above": Case([BASE, archive(folder("var/lib", 0o555, uid=1, gid=2, mtime=1_234_567_890))]),
    "times": Case(
        [
            archive(
                entry("a", b"x", mtime=0),
                entry("b", pax={"mtime": "-86400"}),
                entry("c", pax={"mtime": "1500000000.987654321"}),
                folder("d", mtime=1),
            )
        ]
    ),
    "time-negative-fraction": Case([archive(entry("f", pax={"mtime": "-1.5"}))]),
    "absolute-path": Case(
        [archive(entry("/etc/evil", b"x"))], refused="absolute path", umoci_takes="umoci takes it as relative to the image's root"
    ),
    "upwards": Case(
        [archive(folder("a"), entry("a/../../evil", b"x"))],
        refused="leads upwards",
        umoci_takes="umoci resolves it within the image's root",
    ),
    "upwards-inside": Case(
        [archive(folder("a"), entry("a/../b", b"x"))], refused="leads upwards", umoci_takes="umoci resolves it within the image's root"
    ),
    "hard-link-upwards": Case(
        [archive(entry("f", b"x"), hard_link("g", "../f"))],
        refused="leads upwards",
        umoci_takes="umoci resolves it within the image's root",
    ),
    "hard-link-absolute": Case(
        [archive(entry("f", b"x"), hard_link("g", "/f"))],
        refused="absolute path",
        umoci_takes="umoci takes it as relative to the image's root",
    ),
    "through-link": Case([archive(folder("real"), symlink("a", "real"), entry("a/f", b"x"))]),
    "through-link-outwards": Case(
        [archive(folder("etc"), symlink("out", "../../../etc"), symlink("abs", "/etc"), entry("out/f", b"x"), entry("abs/g", b"y"))]
    ),
    "through-link-in-circles": Case([archive(symlink("a", "b"), symlink("b", "a"), entry("a/f", b"x"))], refused="goes through a file"),
    "through-file": Case([archive(entry("a", b"x"), entry("a/f", b"x"))], refused="goes through a file"),
    "through-link-of-lower-layer": Case([BASE, archive(entry("lib/new", b"x"), entry("lib/.wh.z"))]),
    "hard-link-through-link": Case([archive(folder("real"), entry("real/f", b"x"), symlink("a", "real"), hard_link("g", "a/f"))]),
    "root-entry": Case([archive(folder("./", 0o711, uid=5, gid=6, mtime=12345), entry("f", b"x"))]),
    "many-small-layers": Case(
        [BASE, *(archive(entry(f"var/lib/n{number}", b"%d" % number), entry(f"var/lib/.wh.n{number - 1}")) for number in range(8))]
    ),
    "small-layers-hide-and-make-again": Case(
        [
            BASE,
            archive(folder("var/lib/deep"), entry("var/lib/deep/one", b"1")),
            archive(entry("var/lib/.wh.deep")),
            archive(folder("var/lib/deep", 0o711), entry("var/lib/deep/two", b"2")),
            archive(entry("var/lib/.wh..wh..opq"), entry("var/lib/three", b"3")),
        ]
    ),
    "zstd": Case(
        [BASE, archive(entry("etc/.wh.a"), entry("n", b"x" * 100_000))],
        pack="zstd",
        umoci_refuses=NO_ZSTD,
        umoci_gets=[BASE, archive(entry("etc/.wh.a"), entry("n", b"x" * 100_000))],
    ),
    "not-packed": Case([BASE, archive(entry("etc/.wh.a"), entry("n", b"x" * 100_000))], pack="none"),
    "large-directory": Case([archive(folder("d"), *(entry(f"d/{number:04}-{'n' * 40}", b"%d" % (number % 7)) for number in range(1500)))]),
    "all-together": Case(
        everything(gnu_sparse()),
        differs={"dev/zero": DEVICES, "var: mtime": TOUCHED},
        umoci_refuses=NO_TYPE_S,
        umoci_gets=everything(dense("sparse")),
        notes=["left out the device 'dev/zero'"],
    ),
    "all-together-in-large-layers": Case(
        everything(dense("sparse"), noise=3 << 19),
        differs={"dev/zero": DEVICES, "var: mtime": TOUCHED},
        notes=["left out the device 'dev/zero'"],
    ),
}
