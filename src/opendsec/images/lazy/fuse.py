# SPDX-License-Identifier: Apache-2.0
"""placeholder"""

from __future__ import annotations

from collections.abc import Callable

from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.engine import Engine
from opendsec.images.lazy.registry import Registry


class FuseFiles:
    def __init__(self, registry: Registry, engine: Callable[[CachedLayer], Engine]) -> None: ...
    def start(self) -> None: ...
    def path(self, layer: CachedLayer) -> str:
        return ""
