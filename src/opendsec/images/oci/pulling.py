# SPDX-License-Identifier: Apache-2.0
"""A pull as the worker does it: resolve, see what is there already, fetch the rest, convert it from the lowest layer up, publish.

Each layer is published as soon as it is made, so a pull that fails or is cancelled loses nothing of what it has done; a collection
takes it after its grace period if nobody comes back.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opendsec.api.references import Reference
from opendsec.images import erofs, layers
from opendsec.images.oci import manifest as formats
from opendsec.images.oci import settings
from opendsec.images.oci.archive import Archive
from opendsec.images.oci.below import Lowers
from opendsec.images.oci.cache import Cache, Converted
from opendsec.images.oci.convert import Input, convert
from opendsec.images.oci.groups import groups
from opendsec.images.oci.jobs import Job, Pulled
from opendsec.images.oci.registry import Registry
from opendsec.images.oci.skopeo import Skopeo
from opendsec.images.oci.sources import Layout, Progress, Source
from opendsec.images.store import ImageStore

MAX_NOTES = 200
_MAX_NOTE = 500

Step = Callable[[str], None]


def pull(job: Job, step: Step, progress: Progress, held: contextlib.ExitStack) -> Pulled:
    """Raises errors of the contract, OSError for a full disk."""
    work = Path(job.work)
    store = ImageStore(Path(job.store))
    want = formats.wanted(job.platform)
    step("resolving")
    source = _open(job, work, progress, held)
    config = formats.parse_config(source.config, len(source.layers))
    formats.check_platform(config, want)
    ours, notes = settings.to_ours(config)
    cache = Cache(store, work)
    puller = _Puller(job, store, cache, source, config.diff_ids, work, step, progress)
    made = puller.run()
    notes += [note[:_MAX_NOTE] for item in made for note in item.notes]
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"and {len(notes) - MAX_NOTES} more"]
    return Pulled(digests=_shown(made), config=ours, notes=tuple(notes), source=_name(job.reference, source.digest))


def _open(job: Job, work: Path, progress: Progress, held: contextlib.ExitStack) -> Source:
    reference = job.reference
    want = formats.wanted(job.platform)
    if reference.transport == "oci":
        return Layout(Path(reference.place), reference.tag, want, job.limits, held)
    if reference.transport == "docker-archive":
        return Archive(Path(reference.place), reference.name, reference.tag, work, job.limits, held, progress)
    skopeo = Skopeo(work, reference.place, token=job.token, tls_verify=job.tls_verify, stall_s=job.stall_s, retries=job.retries)
    return Registry(reference, want, skopeo, work, job.limits, held)


def _name(reference: Reference, digest: str) -> str:
    text = str(reference)
    return f"{text}@{digest}" if digest and not reference.digest else text


def _shown(made: Sequence[Converted]) -> tuple[str, ...]:
    """The layers that show: nothing below one that says so. Overlay does not ask a layer's root whether it is opaque."""
    first = max((number for number, item in enumerate(made) if item.alone), default=0)
    digests = [item.digest for item in made[first:]]
    # A layer that comes twice counts where it is highest: there it hides all that the lower one could show.
    return tuple(digest for position, digest in enumerate(digests) if digest not in digests[position + 1 :])


class _Puller:
    def __init__(
        self,
        job: Job,
        store: ImageStore,
        cache: Cache,
        source: Source,
        diff_ids: Sequence[str],
        work: Path,
        step: Step,
        progress: Progress,
    ) -> None:
        self._job, self._store, self._cache, self._source = job, store, cache, source
        self._diff_ids, self._work, self._step, self._progress = diff_ids, work, step, progress
        self._groups = groups([layer.size for layer in source.layers])

    def run(self) -> list[Converted]:
        there = self._there()
        wanted = [number for group, found in zip(self._groups, there, strict=True) if found is None for number in group]
        if wanted:
            self._step(f"fetching {len(wanted)} of {len(self._source.layers)} layers")
        files = self._source.fetch(wanted, self._progress)
        made: list[Converted] = []
        for number, (group, found) in enumerate(zip(self._groups, there, strict=True)):
            if found is None:
                with self._lowers(made) as lowers:
                    found = self._cache.find(self._ids(group), lowers.answers) or self._convert(number, group, files, lowers)
            made.append(found)
        return made

    def _there(self) -> list[Converted | None]:
        """What has been converted before. Above the first that has not, what lies below is not known yet."""
        found: list[Converted | None] = []
        complete: list[Converted] = []
        for group in self._groups:
            if len(complete) == len(found):
                with self._lowers(complete) as lowers:
                    item = self._cache.find(self._ids(group), lowers.answers)
                if item is not None:
                    complete.append(item)
            else:
                item = self._cache.find(self._ids(group), None)
            found.append(item)
        return found

    def _ids(self, group: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._diff_ids[number] for number in group)

    def _lowers(self, made: Sequence[Converted]) -> Lowers:
        return Lowers([self._store.directory(digest) for digest in _shown(made)] if made else [], self._work)

    def _convert(self, number: int, group: Sequence[int], files: dict[int, int], lowers: Lowers) -> Converted:
        names = [self._source.layers[item].name for item in group]
        self._step(f"converting layer {number + 1} of {len(self._groups)}")
        out = self._work / f"layer-{number}"
        out.mkdir(mode=0o755)
        inputs = [
            Input(fd=files[item], size=self._source.layers[item].size, diff_id=self._diff_ids[item], name=name)
            for item, name in zip(group, names, strict=True)
        ]
        total = sum(input.size for input in inputs)
        before = [sum(input.size for input in inputs[:position]) for position in range(len(inputs))]
        made = convert(
            inputs,
            out,
            lowers.answers,
            limits=self._job.limits,
            progress=lambda position, done: self._progress("converting", min(before[position] + done, total), total),
        )
        digest = erofs.digest(out, times=True).digest
        self._store.publish(out, layers.describe(out, digest=digest, kind="base", created_at=time.time()))
        shutil.rmtree(out, ignore_errors=True)  # it has not moved if the layer was there already
        found = Converted(diff_ids=self._ids(group), digest=digest, alone=made.alone, notes=tuple(made.notes), asked=tuple(made.asked))
        self._cache.add(found)
        return found
