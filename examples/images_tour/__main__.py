# SPDX-License-Identifier: Apache-2.0
"""A tour of images, by the commands of the README: `python -m examples.images_tour [--state DIR] [--image NAME]`.

    1. a registry on loopback (Debian's docker-registry), with an image in it
    2. pull it, run it
    3. change something in a sandbox, pack that: a new image; the sandbox goes on
    4. what was left out, what differs, what would leak
    5. push it to the registry, for everybody, and to a store, for those who start it before it is downloaded
    6. another machine, as it were: pull from the store, run it cold, see how little came

Each command is shown as it is run. It ends with exit code 0 only if all of them did what is said here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONFIG = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


class Machine:
    """An edge with directories of its own, and the command line that talks to it."""

    def __init__(self, folder: Path, name: str, *, state: Path | None = None, depot: Path | None = None) -> None:
        self.name, self._run = name, folder / name
        self._state = state or folder / f"{name}-state"
        self._state.mkdir(parents=True, exist_ok=True)
        if depot is not None:
            depot.mkdir(exist_ok=True)
            (self._state / "stores.toml").write_text(f'[[store]]\nname = "depot"\nurl = "{depot}"\nwritable = true\n')

    def dsec(self, *words: str) -> str:
        """Show a command, run it, show and return what it printed. It must succeed."""
        print(f"\n{self.name}$ dsec {shlex.join(words)}", flush=True)
        environment = {
            **os.environ,
            "OPENDSEC_RUN_DIR": str(self._run),
            "OPENDSEC_STATE_DIR": str(self._state),
            "OPENDSEC_SCRATCH_SIZE": "1GiB",
        }
        environment.pop("OPENDSEC_ADDRESS", None)
        command = [str(Path(sys.executable).with_name("dsec")), *words]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"dsec {words[0]} ended with exit code {done.returncode}")
        return done.stdout

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(SystemExit):
            self.dsec("down", "--kill")


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Its HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "registry.yml").write_text(CONFIG.format(root=folder / "registry", port=port))
    # Each blob that it does not have yet is an error to the registry: its log is not for the tour's output.
    command = ["docker-registry", "serve", str(folder / "registry.yml")]
    with open(folder / "registry.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def expect(true: bool, what: str) -> None:
    if not true:
        raise SystemExit(f"not as expected: {what}")


def tour(folder: Path, state: Path | None, image: str) -> None:
    depot = folder / "depot"
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(registry(folder))
        base, change = f"docker://{host}/tour/base:1", f"docker://{host}/tour/change:1"

        builder = stack.enter_context(Machine(folder, "builder", state=state))
        known = [one["name"] for one in json.loads(builder.dsec("image", "ls", "--json"))["images"]]
        if image not in known:
            builder.dsec("image", "build", image, "--debian", "--package", "python3")
        builder.dsec("image", "push", image, base, "--insecure")

        user = stack.enter_context(Machine(folder, "user", depot=depot))
        user.dsec("image", "pull", base, "--insecure", "--name", "base:1")
        expect(user.dsec("run", "base:1", "python3 -c 'print(6 * 7)'") == "42\n", "the pulled image runs")

        box = user.dsec("create", "base:1").strip()
        user.dsec("exec", box, "echo 42 >/root/answer; echo secret >/root/.bash_history; mkdir -p /opt/tool; date >/opt/tool/made")
        packed = user.dsec("pack", box, "change@1")
        expect("/root/.bash_history" in packed, "the history was left out")
        expect(user.dsec("exec", box, "cat /root/answer") == "42\n", "the sandbox goes on")
        expect("/root/answer" in user.dsec("image", "diff", "base:1", "change:1"), "the change is in the image")
        user.dsec("image", "lint", "change:1")
        user.dsec("kill", box)

        user.dsec("image", "push", "change:1", change, "--insecure")
        shown = subprocess.run(["skopeo", "inspect", "--tls-verify=false", change], capture_output=True, text=True, check=True)
        expect(len(json.loads(shown.stdout)["Layers"]) >= 2, "others see an OCI image")
        user.dsec("image", "push", "change:1", "store:depot/change:1")

        other = stack.enter_context(Machine(folder, "other", depot=depot))
        other.dsec("image", "stores")
        other.dsec("image", "pull", "store:depot/change:1")
        expect(other.dsec("run", "change:1", "cat /root/answer; python3 -c 'import json'") == "42\n", "it runs cold")
        layers = json.loads(other.dsec("image", "inspect", "change:1", "--json"))["layers"]
        here, whole = sum(one["local_bytes"] for one in layers), sum(one["layer"]["data_bytes"] for one in layers)
        expect(here < whole / 2, "little of it was needed")
        print(f"\n{100 * here / whole:.1f} % of {whole >> 20} MiB had to come. The tour is complete.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.images_tour", description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, help="a state directory whose images the registry is filled from; made anew by default")
    parser.add_argument("--image", default="debian", help="which image; built from Debian if it is not there")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dsec-tour-", dir="/var/tmp"))
    try:
        tour(folder, options.state, options.image)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
