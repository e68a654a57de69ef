# SPDX-License-Identifier: Apache-2.0
"""Waiting for what must not be cut in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which runs to its end even if we are cancelled meanwhile; the cancellation is raised after that."""
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return future.result()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread, which has ended when this returns, also on cancellation: it may use what the caller then closes."""
    return await to_the_end(asyncio.to_thread(call, *args, **kwargs))
