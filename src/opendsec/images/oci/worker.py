# SPDX-License-Identifier: Apache-2.0
"""The process that pulls or pushes one image: `python -I -m opendsec.images.oci.worker`, started by `pull` and `push`. See `images.job`."""

from __future__ import annotations

import contextlib
import sys

from opendsec.images import job
from opendsec.images.oci.jobs import Job, Line
from opendsec.images.oci.pulling import pull
from opendsec.images.oci.pushing import push


def _work(wanted: Job) -> None:
    telling = job.Telling()
    if wanted.verb == "pull":
        with contextlib.ExitStack() as held:
            job.say(Line(pulled=pull(wanted, telling.step, telling.bytes, held)))
    else:
        push(wanted, telling.step, telling.bytes)
        job.say(Line(pushed=True))


if __name__ == "__main__":
    sys.exit(job.main(Job, _work))
