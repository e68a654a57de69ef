# SPDX-License-Identifier: Apache-2.0
"""The SDK and the command line. Meets the edge on the wire only: may import opendsec.api, msgspec, httpx, Typer and Rich.

_core.py       building requests and reading answers; no I/O
transport.py   the one seam: how a request reaches an edge (TCP and in-process by httpx); unix.py: the local socket
launch.py      starting the local edge
link.py        transport, retries and errors together
aio.py         Client and Sandbox; processes.py, files.py, images.py, transfer.py: what hangs on them
screen.py      screen, mouse and keyboard of a machine; snapshots.py: snapshots
fn.py          function calls and pools; batch.py: one call over many inputs; judge_tasks.py: tasks of the judge in a file
results.py     Result, FnResult and StreamEvent
sync.py        the same classes for programs without an event loop
rollout/       tasks run and judged in bulk
cli/           the command `dsec`, one file a command
"""
