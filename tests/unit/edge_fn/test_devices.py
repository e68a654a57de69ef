# SPDX-License-Identifier: Apache-2.0
"""Placement on devices. FAKE DEVICES: the inventories here are made up; no machine with such devices took part."""

from __future__ import annotations

import pytest

from opendsec.api.errors import QuotaExceeded, Unsupported
from opendsec.edge.fn.devices import Accelerator, Lease, place, supported

FAKE = (
    Accelerator(id="fake-gpu-0", shares=2),
    Accelerator(id="fake-gpu-1", shares=2),
    Accelerator(id="fake-gpu-2", instances=("fake-mig-2a", "fake-mig-2b")),
)


def fill(kind: str, inventory: tuple[Accelerator, ...] = FAKE, held: dict[str, Lease] | None = None) -> list[Lease]:
    """Leases until there is none left."""
    held = dict(held or {})
    found: list[Lease] = []
    while True:
        try:
            lease = place(inventory, held, kind)  # type: ignore[arg-type]
        except QuotaExceeded as error:
            assert error.data["resource"] == "device"
            return found
        assert lease is not None
        held[f"member-{len(held)}"] = lease
        found.append(lease)


def test_none_needs_no_device() -> None:
    assert place((), {}, "none") is None


@pytest.mark.parametrize("kind", ["shared", "exclusive", "mig"])
def test_without_devices_the_kind_is_refused_with_a_reason(kind: str) -> None:
    with pytest.raises(Unsupported, match="has no devices"):
        place((), {}, kind)  # type: ignore[arg-type]


def test_shared_members_are_spread_before_they_are_packed() -> None:
    assert [lease.device for lease in fill("shared")] == ["fake-gpu-0", "fake-gpu-1", "fake-gpu-0", "fake-gpu-1"]


def test_exclusive_members_have_a_device_to_themselves() -> None:
    assert [lease.device for lease in fill("exclusive")] == ["fake-gpu-0", "fake-gpu-1"]
    shared = {"m": Lease("fake-gpu-0", "shared")}
    assert [lease.device for lease in fill("exclusive", held=shared)] == ["fake-gpu-1"]
    alone = {"m": Lease("fake-gpu-0", "exclusive")}
    assert {lease.device for lease in fill("shared", held=alone)} == {"fake-gpu-1"}


def test_instances_are_given_out_one_by_one_and_their_device_no_other_way() -> None:
    assert [lease.instance for lease in fill("mig")] == ["fake-mig-2a", "fake-mig-2b"]
    held = {"m": Lease("fake-gpu-2", "mig", "fake-mig-2a")}
    assert [lease.instance for lease in fill("mig", held=held)] == ["fake-mig-2b"]
    assert "fake-gpu-2" not in {lease.device for kind in ("shared", "exclusive") for lease in fill(kind)}


def test_what_is_given_back_is_given_out_again() -> None:
    held = {f"m{index}": lease for index, lease in enumerate(fill("exclusive"))}
    del held["m0"]
    lease = place(FAKE, held, "exclusive")
    assert lease == Lease("fake-gpu-0", "exclusive")


def test_an_inventory_that_never_fits_says_so() -> None:
    assert "shared" in supported((Accelerator(id="fake"),), "shared")
    assert "partitioned" in supported((Accelerator(id="fake"),), "mig")
    assert "partitioned" in supported((Accelerator(id="fake", instances=("a",)),), "exclusive")
    assert supported(FAKE, "mig") == supported((), "none") == ""


def test_programs_are_told_their_device() -> None:
    assert Lease("fake-gpu-0", "exclusive").env()["CUDA_VISIBLE_DEVICES"] == "fake-gpu-0"
    assert Lease("fake-gpu-2", "mig", "fake-mig-2a").env()["CUDA_VISIBLE_DEVICES"] == "fake-mig-2a"
