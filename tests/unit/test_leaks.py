# SPDX-License-Identifier: Apache-2.0
"""The leak detector sees what it claims to see, and lets through what it is told to."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading

import pytest

from tests import leaks


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> leaks.LeakDetector:
    monkeypatch.setattr(leaks, "SETTLE_S", 0.0)
    detector = leaks.LeakDetector(machine=None)
    detector.start()
    return detector


def test_descriptor(detector: leaks.LeakDetector) -> None:
    fd = os.open("/etc/passwd", os.O_RDONLY)
    assert detector.leaked() == {"descriptors": {f"{fd} /etc/passwd": "/etc/passwd"}}
    os.close(fd)
    assert detector.leaked() == {}


def test_child(detector: leaks.LeakDetector) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        leaked = detector.leaked()
        assert list(leaked["children"].values()) == ["cat"]
        assert leaked["children"].keys() == {leaks._process(str(child.pid))[0]}
    assert detector.leaked() == {}


def test_thread_and_temporary_file(detector: leaks.LeakDetector) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    folder = tempfile.mkdtemp()
    assert detector.leaked().keys() == {"threads", "temporary files"}
    stop.set()
    thread.join()
    os.rmdir(folder)


def test_wider_fixtures_may_hold_things(detector: leaks.LeakDetector) -> None:
    before = leaks.snapshot()
    fd = os.open("/etc/passwd", os.O_RDONLY)
    detector.hold(before)
    assert detector.leaked() == {}
    os.close(fd)


def test_allowance_is_by_kind_and_pattern(detector: leaks.LeakDetector) -> None:
    detector.allow("descriptors", "^/etc/passwd$")
    first, second = os.open("/etc/passwd", os.O_RDONLY), os.open("/etc/group", os.O_RDONLY)
    assert list(detector.leaked()["descriptors"].values()) == ["/etc/group"]
    os.close(first)
    os.close(second)


def test_description_names_the_thing() -> None:
    text = leaks.describe({"mounts": {"36 /mnt": "erofs on /mnt"}})
    assert text == "the test left behind:\n  mounts: 36 /mnt (erofs on /mnt)"
