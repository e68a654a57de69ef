# SPDX-License-Identifier: Apache-2.0
"""The parts of a real edge: which backends, which images, which scratch. The one place that names implementations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from opendsec.api.errors import InvalidRequest, Unavailable
from opendsec.api.sandboxes import Capabilities, Feature
from opendsec.edge.admission import Policy
from opendsec.edge.config import BadSettings, Settings
from opendsec.edge.fn import devices, languages
from opendsec.edge.fn.languages import Languages
from opendsec.edge.fn.parts import NAME as FNCALL
from opendsec.edge.fn.parts import FnParts
from opendsec.edge.loading import Loading, feature
from opendsec.edge.log import Log
from opendsec.edge.machines import FOLDER, Machines, missing_for_machines, parts_of
from opendsec.edge.machines import capabilities as machine_capabilities
from opendsec.edge.machines import features as machine_features
from opendsec.images.lazy.client import Settings as LoaderSettings
from opendsec.images.lazy.client import choose as choose_mechanism
from opendsec.images.lazy.protocol import Mechanism
from opendsec.images.lazy.source import LazyData
from opendsec.images.remote.config import FILE as STORES_FILE
from opendsec.images.remote.config import Stores, load
from opendsec.images.store import ImageStore
from opendsec.kernel import features, procfs
from opendsec.runtime.backend import Backend
from opendsec.runtime.container.backend import NAME, NEEDED, ContainerBackend, capabilities
from opendsec.runtime.fncall import backend as fncall
from opendsec.runtime.scratch import ScratchSettings, choose


async def _nothing() -> None:
    pass


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge is made of."""

    backends: Mapping[str, Backend]
    images: ImageStore
    boot_id: str
    scratch_driver: str
    scratch_bytes: int  # of the pool; of memory, if scratch_is_memory
    scratch_is_memory: bool
    features: tuple[Feature, ...] = ()
    stores: Stores = Stores({})
    loading: Loading | None = None  # None: nothing is loaded on demand
    fn: FnParts | None = None  # None: no function calls
    started: Callable[[], None] = lambda: None  # to be told once the backends are
    close: Callable[[], Awaitable[None]] = _nothing

    def policy(self, settings: Settings) -> Policy:
        """What may be promised here."""
        memory_bytes = settings.memory_bytes()
        return Policy(
            memory_bytes=memory_bytes,
            disk_bytes=0 if self.scratch_is_memory else int(self.scratch_bytes * settings.disk_overcommit),
            sandboxes=settings.max_sandboxes,
            scratch_is_memory=self.scratch_is_memory,
            max_memory_bytes=settings.max_memory,
            max_disk_bytes=settings.max_disk,
            max_cpu=settings.max_cpu,
            max_pids=settings.max_pids,
        )


async def assemble(settings: Settings, edge_id: str, log: Log) -> Parts:
    """Build them; the scratch is started, the backend is not."""
    found = probed_features()  # forks, so before there are threads
    mechanism, why = mechanism_of(settings)
    stores = load_stores(settings.state_dir / STORES_FILE)
    root = settings.state_dir / "images"
    images = ImageStore(root, data_source=LazyData(settings.run_dir))
    images.prepare()
    loader = LoaderSettings(
        root=root,
        run_dir=settings.run_dir,
        stores=settings.state_dir / STORES_FILE,
        mechanism=mechanism,
        limit_bytes=settings.cache_bytes(),
    )
    loading = Loading(loader, why, log)
    await loading.start_if_needed(images)
    scratch, reason = await choose(settings.state_dir, scratch_settings(settings))
    log.info("edge.scratch", driver=scratch.name, reason=reason)
    backend = ContainerBackend(
        edge_id=edge_id,
        scratch=scratch,
        staging=settings.run_dir,
        lock=settings.state_dir / "spawner.lock",
        missing=missing_for_containers(found),
    )

    machines = Machines(settings, edge_id, backend, found, log)

    async def close() -> None:
        await machines.close()
        await backend.close()
        await loading.close(unneeded=not scratch.list())
        await stores.close()
        # The pool holds half of the free disk: an edge that leaves no sandboxes gives it back. Making one takes a fraction of a second.
        await scratch.close(remove=not scratch.list())

    return Parts(
        backends={backend.name: backend, **machines.backends},
        images=images,
        boot_id=procfs.boot_id(),
        scratch_driver=f"{scratch.name}: {reason}",
        scratch_bytes=scratch.size_bytes,
        scratch_is_memory=scratch.in_memory,
        features=(*found, *machine_features(parts_of(settings)), feature(mechanism, why)),
        stores=stores,
        loading=loading,
        fn=FnParts(
            backend=fncall.FnMembers(backend),
            languages=load_languages(settings),
            members=settings.fn_members,
            cache_bytes=settings.fn_cache,
        ),
        started=machines.started,
        close=close,
    )


def load_languages(settings: Settings) -> Languages:
    """The definitions of languages, the operator's among them. Raises BadSettings."""
    try:
        return languages.load(settings.fn_languages, settings.fn_images)
    except ValueError as error:
        raise BadSettings(f"--fn-languages, --fn-images: {error}") from None


def mechanism_of(settings: Settings) -> tuple[Mechanism, str]:
    """How layers are loaded here, and why so. Raises BadSettings if what is asked for does not work here. May fork."""
    try:
        return choose_mechanism(settings.state_dir, settings.lazy)
    except Unavailable as error:
        raise BadSettings(f"--lazy: {error.message}") from None


def load_stores(path: Path) -> Stores:
    """The operator's remote stores. Raises BadSettings."""
    try:
        return load(path)
    except (InvalidRequest, OSError) as error:
        raise BadSettings(f"{path}: {error}") from None


def probed_features() -> tuple[Feature, ...]:
    """The machine's features, as `dsec doctor` shows them."""
    return tuple(
        Feature(name=one.name, present=one.present, reason=one.reason, needed_for=one.needed_for, without_it=one.without_it)
        for one in features.probe_all()
    )


def missing_for_containers(found: Iterable[Feature]) -> list[str]:
    """What the container backend needs and this machine lacks."""
    return [f"{one.name}: {one.reason}" for one in found if one.name in NEEDED and not one.present]


def doctor() -> Capabilities:
    """What an edge on this machine could do, without starting one."""
    found = probed_features()
    state_dir = Path("/var/lib/opendsec")
    loading = feature(*choose_mechanism(next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())))
    missing = missing_for_containers(found)
    backends = {NAME: capabilities(missing), FNCALL: (*fncall.capabilities(missing), devices.capability(()))}
    backends |= machine_capabilities([*missing_for_machines(found), *missing])
    return Capabilities(backends=backends, features=(*found, *machine_features(state_dir / FOLDER), loading))


def scratch_settings(settings: Settings) -> ScratchSettings:
    return msgspec.convert({"driver": settings.scratch_driver, "size_bytes": settings.scratch_size}, ScratchSettings)
