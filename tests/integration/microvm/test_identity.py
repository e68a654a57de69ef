# SPDX-License-Identifier: Apache-2.0
"""Clones share every bit of memory with their siblings, until they are given an identity of their own."""

from __future__ import annotations

import re
import time

import pytest

from opendsec.api.errors import Unavailable
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.runtime.backend import Handle
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow

FIRST = """
import os, random, ssl, uuid
print("kernel", os.urandom(16).hex())
print("python", random.getrandbits(128), uuid.uuid4())
print("openssl", ssl.RAND_bytes(16).hex())
print("machine-id", open("/etc/machine-id").read().strip())
print("boot-id", open("/proc/sys/kernel/random/boot_id").read().strip())
print("hostname", os.uname().nodename)
"""
DRAWN = ("kernel", "python", "openssl", "machine-id", "boot-id", "hostname")


async def first_words(handle: Handle) -> dict[str, str]:
    text, ended = await output(handle, "python3", "-c", FIRST)
    assert ended.code == 0, text
    return {name: value for name, _, value in (line.partition(" ") for line in text.decode().splitlines())}


async def test_siblings_draw_different_numbers_and_have_different_names(vms: Setup) -> None:
    seen = []
    for _ in range(20):
        async with vms.box() as handle:
            seen.append(await first_words(handle))
    for name in DRAWN:
        assert len({words[name] for words in seen}) == 20, name
    assert all(re.fullmatch(r"[0-9a-f]{32}", words["machine-id"]) for words in seen)
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", words["boot-id"]) for words in seen)
    assert all(words["hostname"].startswith("sb-") for words in seen)


async def test_forks_draw_different_numbers(vms: Setup) -> None:
    async with vms.box() as source:
        snapshot = await source.snapshot(new_id(SNAPSHOT), memory=True)
        seen = [await first_words(source)]
        for _ in range(3):
            async with vms.box(snapshot=snapshot) as fork:
                seen.append(await first_words(fork))
        await vms.backend.remove_snapshot(snapshot)
    for name in DRAWN:
        assert len({words[name] for words in seen}) == 4, name


async def test_the_clock_is_right_when_created_resumed_and_forked(vms: Setup) -> None:
    async def off(handle: Handle) -> float:
        before = time.time()
        text, _ = await output(handle, "date", "+%s.%N")
        said, after = float(text), time.time()
        return max(before - said, said - after, 0.0)

    async with vms.box() as handle:
        assert await off(handle) < 0.5
        snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=True)
        paused = await handle.pause()
        await vms.backend.resume(paused)
        assert await off(handle) < 0.5
        async with vms.box(snapshot=snapshot) as fork:
            assert await off(fork) < 0.5
        await vms.backend.remove_snapshot(snapshot)


async def test_who_does_not_confirm_its_identity_is_not_handed_out(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(channel: Channel, **fields: object) -> None:
        raise Unavailable("the guest did not confirm its new identity")

    backend = vms.backend
    assert isinstance(backend, MicroVMBackend)
    placement = vms.placement()
    await backend.prepare(placement)
    monkeypatch.setattr(Channel, "identity", refuse)
    with pytest.raises(Unavailable, match="identity"):
        await backend.create(placement)
    assert backend.leftovers() == []
