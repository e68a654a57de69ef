# SPDX-License-Identifier: Apache-2.0
"""Routes about commands and sessions."""

from __future__ import annotations

from opendsec.api.errors import Unsupported
from opendsec.edge.http import Answer, Handler, Request
from opendsec.edge.node import Node


class ExecRoutes:
    def __init__(self, node: Node) -> None:
        self._node = node

    def handlers(self) -> dict[str, Handler]:
        names = "RUN STREAM START PROCESSES PROCESS WAIT ATTACH STDIN SIGNAL RESIZE OPEN_SESSION SESSION SESSION_RUN SESSION_CLOSE"
        return dict.fromkeys(names.split(), self.later)

    async def later(self, request: Request) -> Answer:
        raise Unsupported("not yet")
