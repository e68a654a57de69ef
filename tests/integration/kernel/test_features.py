# SPDX-License-Identifier: Apache-2.0
"""The feature table: every probe ends in an answer, remembers it, and can be overruled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.kernel import features, procfs
from opendsec.kernel.probes import tools

# What this project's machines for CI must have; the rest may be missing there.
NEEDED = {
    "user_namespaces",
    "sandbox_namespaces",
    "pidfd",
    "seccomp_filter",
    "openat2",
    "idmapped_mounts",
    "overlay_fd",
    "tmpfs",
    "cgroup_limits",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of this test alone, and of no other's environment."""
    monkeypatch.delenv(features.FORCE_MISSING, raising=False)
    monkeypatch.setattr(features, "_results", {})


def test_every_probe_answers_and_leaves_nothing(tmp_path: Path) -> None:
    """What it could leave, the leak detector sees."""
    table = features.probe_all(str(tmp_path))
    assert [feature.name for feature in table] == features.names()
    for feature in table:
        assert feature.present or feature.reason, feature
        assert feature.needed_for, feature
        assert feature.without_it, feature
    missing = {feature.name: feature.reason for feature in table if not feature.present}
    assert not NEEDED & missing.keys(), missing
    assert os.listdir(tmp_path) == []


def test_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = features.probe("openat2")
    monkeypatch.setattr(features, "_probes", {"openat2": None})
    assert features.probe("openat2") is first or features.forced_missing()


def test_forced_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.probe("openat2").present
    monkeypatch.setenv(features.FORCE_MISSING, "openat2, kvm,")
    feature = features.probe("openat2")
    assert not feature.present
    assert features.FORCE_MISSING in feature.reason
    assert features.probe("pidfd").present
    monkeypatch.delenv(features.FORCE_MISSING)
    assert features.probe("openat2").present


def test_a_typo_in_forced_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(features.FORCE_MISSING, "openat3")
    with pytest.raises(ValueError, match="openat3"):
        features.probe("openat2")
    with pytest.raises(KeyError):
        monkeypatch.delenv(features.FORCE_MISSING)
        features.probe("openat3")


def test_errors_become_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(scratch: str) -> str:
        raise PermissionError(1, "Operation not permitted", "/some/file")

    def hangs_up(scratch: str) -> str:
        tools.in_child(lambda: os.kill(os.getpid(), 9))
        return ""

    for name, run, reason in (
        ("openat2", fails, "Operation not permitted (/some/file)"),
        ("pidfd", hangs_up, "the probe ended with SIGKILL"),
    ):
        monkeypatch.setitem(features._probes, name, features._Probe(name, run, "x", "y"))
        assert features.probe(name) == features.Feature(name, False, reason, "x", "y")


def test_an_unusable_scratch_directory_is_a_reason() -> None:
    feature = features.probe("openat2", "/nowhere")
    assert not feature.present
    assert "No such file" in feature.reason


def test_mounts_stay_as_they_were() -> None:
    before = [mount.mount_id for mount in procfs.mountinfo()]
    features.probe_all()
    assert [mount.mount_id for mount in procfs.mountinfo()] == before
