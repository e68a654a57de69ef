# SPDX-License-Identifier: Apache-2.0
"""The probes that operators may run: each finds every defence in place, and finds out where one is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from opendsec.kernel import seccomp, syscall_table
from opendsec.kernel.seccomp import ALLOW, Rule
from opendsec.runtime.container import plan as plans
from opendsec.testing import redteam
from tests.boxes import Box, Node
from tests.support import ROOT

CASES = [pytest.param(probe, user, id=f"{probe.threat}-{probe.title}-{user}") for probe in redteam.PROBES for user in probe.users]


def findings(node: Node, box: Box, probes: Sequence[redteam.Probe]) -> list[redteam.Finding]:
    async def execute(argv: Sequence[str], user: str) -> tuple[int | None, str]:
        result = await (await box.start_async(*argv, user=user)).ended()
        return result.code, (result.out + result.err).decode()

    return node.wait(redteam.run(execute, probes))


@pytest.mark.parametrize(("probe", "user"), CASES)
def test_probe(node: Node, box: Box, probe: redteam.Probe, user: str) -> None:
    (finding,) = (finding for finding in findings(node, box, [probe]) if finding.user == user)
    assert finding.verdict == redteam.Verdict.HELD, finding.detail
    assert box.works()


def test_a_missing_defence_is_found(node: Node, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the filter the kernel's own checks are left."""
    program = seccomp.compile_filter([Rule(ALLOW, syscall_table.ALL_NAMES)], ALLOW)
    node.wait(node.spawner.call("profile", {"name": b"open", "program": program}))
    monkeypatch.setattr(plans, "PROFILE_NAME", b"open")
    broken = {finding.probe.threat for finding in findings(node, box, redteam.PROBES) if finding.verdict == redteam.Verdict.BROKEN}
    assert {"T06", "T07", "T35"} <= broken
    assert not broken & {"T03", "T04", "T05", "T10", "T20", "T34"}


def test_threats_are_those_of_the_model() -> None:
    model = (ROOT / "docs" / "threat-model.md").read_text()
    assert all(f"| {probe.threat} |" in model for probe in redteam.PROBES)
