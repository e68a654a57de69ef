# SPDX-License-Identifier: Apache-2.0
"""What goes into QEMU's root directory, and which copies go away."""

from __future__ import annotations

from pathlib import Path

from opendsec.runtime.vmm import programs


def source(folder: Path) -> dict[str, Path]:
    (folder / "program").write_text("x")
    (folder / "program").chmod(0o755)
    (folder / "data").write_text("y")
    return {"/usr/bin/qemu-system-x86_64": folder / "program", "/usr/share/qemu/data.bin": folder / "data"}


def test_filled(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    programs.fill(root, source(tmp_path))
    assert (root / "usr/bin/qemu-system-x86_64").stat().st_mode & 0o777 == 0o111
    assert (root / "usr/share/qemu/data.bin").stat().st_mode & 0o777 == 0o444
    assert {path.name for path in root.iterdir()} - {"bin"} == {"usr", "complete", *programs.FOLDERS, *programs.PLACES}


def test_another_file_is_another_digest(tmp_path: Path) -> None:
    files = source(tmp_path)
    before = programs.digest_of(files, "10.0.2")
    assert before == programs.digest_of(files, "10.0.2") != programs.digest_of(files, "10.0.3")
    (tmp_path / "data").write_text("yy")
    assert programs.digest_of(files, "10.0.2") != before


def test_only_what_is_not_kept_is_removed(tmp_path: Path) -> None:
    for name in ("a", "b", ".making-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").touch()
    assert programs.collect(tmp_path, {"a"}) == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-c", "a"]
    assert programs.collect(tmp_path / "none", set()) == []
