# SPDX-License-Identifier: Apache-2.0
"""Rules for every test: leaks fail it, a skip needs a missing kernel feature, hostile-input fuzzing is repeatable."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests import leaks

pytest_plugins = ["tests.images", "tests.boxes", "tests.fnmembers", "tests.services", "tests.timeouts", "tests.vmms"]

settings.register_profile("default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_detector: pytest.StashKey[leaks.LeakDetector] = pytest.StashKey()
MISSING = "missing kernel feature "


def pytest_configure(config: pytest.Config) -> None:
    # Everything made with `tempfile` lands here, in this process and its children, so that what stays is seen as a leak.
    # The path is short because unix sockets allow 107 bytes.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it is
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Tests send these to programs, which inherit what this process was started with (nohup, a background job).
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.stash[_detector] = leaks.LeakDetector(leaks.Machine())


@pytest.fixture(scope="session")
def leak_detector(request: pytest.FixtureRequest) -> leaks.LeakDetector:
    """For shared fixtures whose helpers make things later, on demand: `leak_detector.allow("cgroups", "opendsec-" + edge_id)`."""
    return request.config.stash[_detector]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    before = leaks.snapshot()
    try:
        return (yield)
    finally:
        request.config.stash[_detector].hold(before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.config.stash[_detector].start()
    skip_without_features(item)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if leaked := item.config.stash[_detector].leaked():
        pytest.fail(leaks.describe(leaked), pytrace=False)
    return result


def skip_without_features(item: pytest.Item) -> None:
    names = [name for mark in item.iter_markers("requires") for name in mark.args]
    if not names:
        return
    features = importlib.import_module("opendsec.kernel.features")
    for name in names:
        feature = features.probe(name)  # KeyError: no such feature, a mistake in the test
        if not feature.present:
            pytest.skip(f"{MISSING}{name}: {feature.reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        if MISSING not in reason:
            report.outcome = "failed"
            report.longrepr = f"{reason}\nA test may skip only for a kernel feature, by tests.support.requires()."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "skipped" and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}\nA test module may not skip itself in CI."
    return report
