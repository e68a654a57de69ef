# SPDX-License-Identifier: Apache-2.0
"""`dsec image stores`: where images can be kept."""

from __future__ import annotations

from opendsec.client.cli import common as c


def stores(
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """List the remote stores that the operator has configured (stores.toml in the edge's state directory)."""
    from opendsec.api.images import StoreList

    async def work() -> StoreList:
        async with c.connect(address) as client:
            return StoreList(tuple(await client.images.stores()))

    found = c.execute(work(), json=json)
    if json:
        c.print_json(found)
    else:
        c.table(("STORE", "WRITABLE", "WHERE"), ((one.name, "yes" if one.writable else "no", one.url) for one in found.stores))
