# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.desktop [--image NAME] [--pictures DIR]`: open an editor in the Debian desktop, type, save, and look at the file.

The image is made once, in some minutes: `dsec image build-disk debian-desktop --desktop`. The first VM of it boots, later ones are clones.
Each step is told as it is done; with --pictures what the screen showed then is kept. Ends with exit code 0 only if the file holds what
was typed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import opendsec as od
from opendsec.client.aio import Sandbox

TEXT = 'Typed by a program: 2 + 2 = 4, and "quotes" too.\n'
FILE = "/home/user/note.txt"
PATIENCE_S = 300.0


class Recorder:
    """What is told, and pictures of it."""

    def __init__(self, box: Sandbox, folder: Path | None) -> None:
        self._box, self._folder, self._number = box, folder, 0
        self._begun = time.monotonic()

    async def step(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  {what}", flush=True)
        self._number += 1
        if self._folder is not None:
            picture = await self._box.screen.png()
            await asyncio.to_thread((self._folder / f"{self._number}.png").write_bytes, picture)


async def opened(box: Sandbox, before: bytes) -> None:
    """Wait until a window is there: it changes what is shown a lot, and when it is complete only a cursor blinks."""
    last = now = before
    async with asyncio.timeout(PATIENCE_S):
        while len(last) < len(before) * 3 // 2 or abs(len(now) - len(last)) * 20 > len(last):
            await asyncio.sleep(1)
            await box.mouse.click(640, 400)  # a clone's desktop may show what it has drawn only with the next event
            last, now = now, await box.screen.png()


async def edit(box: Sandbox, folder: Path | None) -> str:
    """What the file holds in the end."""
    recorder = Recorder(box, folder)
    await box.run(["install", "-o", "user", "-m", "644", "/dev/null", FILE], check=True)
    before = await box.screen.png()
    await recorder.step("the desktop")
    # NO_AT_BRIDGE: else GTK waits 25 s for a bus that is not there.
    editor = await box.start(["l3afpad", FILE], user="user", env={"DISPLAY": ":0", "HOME": "/home/user", "NO_AT_BRIDGE": "1"})
    await opened(box, before)
    await recorder.step("the editor is open")
    width, height = await box.screen.size()
    await box.mouse.click(width // 2, height // 2)
    await box.keyboard.type(TEXT)
    await recorder.step("typed")
    await box.keyboard.press("ctrl+s")
    async with asyncio.timeout(PATIENCE_S):
        while not (held := await box.files.read(FILE)):
            await asyncio.sleep(0.5)
    await recorder.step("saved")
    await editor.kill()
    return held


async def main(image: str, folder: Path | None) -> int:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    async with od.Client() as client:
        begun = time.monotonic()
        box = await client.create(od.VM(image=image, memory="1GiB", disk="8GiB", ttl_s=1800))
        print(f"a VM after {time.monotonic() - begun:.1f} s", flush=True)
        try:
            held = await edit(box, folder)
        finally:
            await box.kill()
    print(f"{FILE} holds {held!r}")
    return 0 if held.strip() == TEXT.strip() else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.desktop", description="An editor in a desktop, by screen and keyboard.")
    parser.add_argument("--image", default="debian-desktop")
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.image, options.pictures)))
