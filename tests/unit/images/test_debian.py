# SPDX-License-Identifier: Apache-2.0
"""Which of a machine's apt sources serve a suite, and what becomes of a fresh tree. Host names are examples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest, Unavailable
from opendsec.api.images import DebianSource
from opendsec.images import debian
from opendsec.images.debian import Entry

DEB822 = """\
Types: deb deb-src
# URIs: http://other.example/debian
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: trixie
Components: main

Types: deb-src
URIs: http://src.example/debian
Suites: trixie
Components: main

types: deb
uris: http://mirror.example/debian-security
suites: trixie-security
components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 aGVsbG8=
 -----END PGP PUBLIC KEY BLOCK-----
"""

ONE_LINE = """\
# deb http://comment.example/debian trixie main
deb http://mirror.example/debian trixie main non-free  # of the site
deb [arch=amd64,arm64 signed-by=/keys/debian-archive.gpg trusted=yes] http://mirror.example/debian trixie-updates main
deb-src http://mirror.example/debian trixie main
debris
deb http://flat.example/repo ./
"""


def test_deb822_is_read() -> None:
    first, second = debian.parse_deb822(DEB822)
    assert first.uris == ("http://mirror.example/debian",)
    assert first.suites == ("trixie", "trixie-updates")
    assert first.components == ("main", "contrib")
    assert first.options == {"Signed-By": "/usr/share/keyrings/debian-archive-keyring.gpg"}
    assert second.suites == ("trixie-security",)
    assert second.options["Signed-By"].startswith("\n -----BEGIN")


def test_one_line_form_is_read() -> None:
    first, second, flat = debian.parse_one_line(ONE_LINE)
    assert (first.uris, first.suites, first.components) == (("http://mirror.example/debian",), ("trixie",), ("main", "non-free"))
    assert second.options == {"Architectures": "amd64 arm64", "Signed-By": "/keys/debian-archive.gpg", "Trusted": "yes"}
    assert flat.components == ()


@given(st.text(max_size=200))
def test_parsing_is_total(text: str) -> None:
    for entry in [*debian.parse_deb822(text), *debian.parse_one_line(text)]:
        assert isinstance(entry.stanza(), str)


@pytest.mark.parametrize("entry", [*debian.parse_deb822(DEB822), *debian.parse_one_line(ONE_LINE)])
def test_a_stanza_reads_as_the_entry_it_was_made_of(entry: Entry) -> None:
    assert list(debian.parse_deb822(entry.stanza())) == [entry]


def entry(uri: str, suites: str, components: str = "main", key: str | None = "/usr/share/keyrings/debian-archive-keyring.gpg") -> Entry:
    return Entry((uri,), tuple(suites.split()), tuple(components.split()), {} if key is None else {"Signed-By": key})


def test_only_the_distributions_own_entries_serve_a_suite() -> None:
    chosen = debian.select(
        [
            entry("a", "trixie trixie-updates trixie-backports", "main contrib"),
            entry("b", "trixie-security", key=None),
            entry("c", "trixie", key="/etc/apt/keyrings/vendor.gpg"),
            entry("d", "trixie", "stable"),
            entry("e", "trixie", "main vendor"),
            entry("f", "bookworm"),
        ],
        "trixie",
    )
    assert [(one.uris, one.suites) for one in chosen] == [(("a",), ("trixie", "trixie-updates")), (("b",), ("trixie-security",))]


def test_a_companys_mirror_serves_if_nothing_else_does() -> None:
    own = entry("own", "trixie", key="/etc/apt/keyrings/company.gpg")
    assert debian.select([own, entry("other", "bookworm")], "trixie") == [own]


def test_a_suite_that_no_source_offers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no apt source of this machine offers suite 'sid'; it has bookworm, trixie") as caught:
        debian.select([entry("a", "trixie"), entry("b", "bookworm"), entry("c", "x", "stable")], "sid")
    assert caught.value.field == "source.suite"
    with pytest.raises(InvalidRequest):
        debian.select([entry("a", "trixie-updates")], "trixie")  # updates alone make no system


def test_the_machines_sources_are_all_files_of_both_forms(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/debian trixie main\n")
    (tmp_path / "sources.list.d" / "two.list").write_text("deb http://two.example/debian trixie main\n")
    (tmp_path / "sources.list.d" / "three.sources").write_text(entry("http://three.example/debian", "trixie").stanza())
    (tmp_path / "sources.list.d" / "four.list.disabled").write_text("deb http://four.example/debian trixie main\n")
    assert [one.uris[0].split("/")[2].split(".")[0] for one in debian.machine_sources(tmp_path)] == ["one", "three", "two"]


def test_the_machines_suite() -> None:
    assert debian.machine_suite('ID=debian\nVERSION_CODENAME=trixie\nHOME_URL="x"\n') == "trixie"
    assert debian.machine_suite('VERSION_CODENAME="noble"\n') == "noble"
    assert debian.machine_suite("ID=arch\n") == ""


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (DebianSource(suite="../x"), "source.suite"),
        (DebianSource(suite="-x"), "source.suite"),
        (DebianSource(packages=("ok", "--hook=x")), "source.packages[1]"),
        (DebianSource(packages=("?essential",)), "source.packages[0]"),
        (DebianSource(packages=("a,b",)), "source.packages[0]"),
        (DebianSource(packages=("",)), "source.packages[0]"),
    ],
)
def test_names_that_are_none_are_refused(source: DebianSource, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        debian.check(source)
    assert caught.value.field == field


def test_packages_may_have_versions_and_architectures() -> None:
    debian.check(
        DebianSource(suite="bookworm", packages=("python3", "g++", "git=1:2.39.5-0+deb12u2", "libc6:amd64", "git/bookworm-security"))
    )


# --- a fresh tree --------------------------------------------------------------------------------------------------


def put(root: Path, path: str, text: str = "x") -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root / path


def test_finishing_takes_the_machine_and_the_day_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", put(tmp_path, "outside/resolv.conf", "nameserver 192.0.2.1\n")
    for path in ("bin/sh", "etc/hostname", "etc/apt/sources.list.d/x.sources", "etc/apt/apt.conf.d/99mmdebstrap", "etc/passwd-"):
        put(root, path)
    for path in ("var/log/apt/term.log", "var/lib/apt/lists/x_Packages", "var/cache/debconf/config.dat-old", "run/lock/x", "tmp/x"):
        put(root, path)
    put(root, "var/cache/apt/archives/x.deb")
    kept = [put(root, path) for path in ("etc/passwd", "usr/lib/python3/__pycache__/x.pyc", "var/cache/debconf/config.dat")]
    put(root, "etc/shadow", "root:*:20421:0:99999:7:::\ndaemon:!:20421:0:99999:7:::\n")
    os.symlink(outside, root / "etc/resolv.conf")
    os.symlink(outside.parent, root / "var/log/link")

    debian.finish(root)

    assert outside.read_text() == "nameserver 192.0.2.1\n"
    assert (root / "etc/resolv.conf").read_text() == ""
    assert not (root / "etc/resolv.conf").is_symlink()
    assert "127.0.0.1\tlocalhost" in (root / "etc/hosts").read_text()
    assert (root / "etc/hostname").read_text() == "localhost\n"
    assert (root / "etc/machine-id").read_text() == ""
    assert (root / "etc/shadow").read_text() == "root:*:10957:0:99999:7:::\ndaemon:!:10957:0:99999:7:::\n"
    assert all(path.exists() for path in kept)
    left = {os.path.join(folder, name)[len(str(root)) + 1 :] for folder, _, files in os.walk(root) for name in files}
    assert not left & {"etc/passwd-", "etc/apt/sources.list.d/x.sources", "etc/apt/apt.conf.d/99mmdebstrap"}
    assert not [path for path in left if path.startswith(("var/log", "var/lib/apt/lists", "run", "tmp", "var/cache/apt"))]
    modes = {name: (root / name).stat().st_mode & 0o7777 for name in ("dev", "proc", "sys", "run", "tmp", "var/tmp")}
    assert modes == {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}


def test_a_tree_without_a_shell_is_no_base(tmp_path: Path) -> None:
    put(tmp_path, "etc/passwd")
    (tmp_path / "var").mkdir()
    with pytest.raises(Unavailable, match="/bin/sh"):
        debian.finish(tmp_path)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (["I: x", "E: Unable to locate package nosuch"], InvalidRequest, "the suite has no package 'nosuch'"),
        (["E: Unable to locate package nosuch", "E: apt-get failed"], InvalidRequest, "the suite has no package 'nosuch'$"),
        (["E: Package 'nosuch' has no installation candidate"], InvalidRequest, "the suite has no package 'nosuch'"),
        (["W: Failed to fetch x", "E: apt-get update failed"], Unavailable, "Failed to fetch x; E: apt-get"),
        (["something"], Unavailable, "something"),
    ],
)
def test_failures_say_who_is_at_fault(said: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        raise debian._failure(said)
