# SPDX-License-Identifier: Apache-2.0
"""`stores.toml`: what is read, what is refused, and that what is secret stays so."""

from __future__ import annotations

import traceback
from pathlib import Path

import msgspec
import pytest
from rich.pretty import pretty_repr

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.images import StoreInfo
from opendsec.images.remote import config
from opendsec.images.remote.config import StoreConfig, Stores

SECRET = "PLANTED"
GOOD = b"""
[[store]]
name = "team"
url = "s3://bucket/some/prefix"
writable = true
deadline_s = 20
[store.options]
endpoint = "http://127.0.0.1:1"
region = "eu"
access_key_id = "PLANTED-id"
secret_access_key = "PLANTED-key"

[[store]]
name = "web"
url = "https://user:PLANTED-password@example.invalid/images?sig=PLANTED-query#PLANTED"
[store.options_from_env]
authorization = "TOKEN"

[[store]]
name = "mount"
url = "/mnt/images"

[[store]]
name = "mount-2"
url = "file:///mnt/images"
"""


ENVIRON = {"TOKEN": "Bearer PLANTED-token"}


def parse(text: bytes) -> list[StoreConfig]:
    return config.parse(text, ENVIRON)


def test_a_configuration_is_read() -> None:
    team, web, mount, _ = parse(GOOD)
    assert (team.name, team.writable, team.patience.deadline_s, team.patience.attempt_s) == ("team", True, 20.0, 10.0)
    assert team.options["secret_access_key"] == "PLANTED-key"
    assert web.options == {"authorization": "Bearer PLANTED-token"}
    assert [store.info() for store in (team, web, mount)] == [
        StoreInfo(name="team", url="s3://bucket/some/prefix", writable=True),
        StoreInfo(name="web", url="https://example.invalid/images", writable=False),
        StoreInfo(name="mount", url="file:///mnt/images", writable=False),
    ]


def test_no_form_of_it_shows_a_secret() -> None:
    for store in parse(GOOD):
        shown = [repr(store), str(store), f"{[store]}", pretty_repr(store), msgspec.json.encode(store.info()).decode()]
        opened = config.open_store(store)
        shown += [repr(opened), str(vars(opened))]
        assert SECRET not in "".join(shown)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", "region = 'x'"),
        ("gs://bucket/prefix", "skip_signature = 'true'"),
        ("az://container/prefix", "account_name = 'name'\naccount_key = 'UExBTlRFRA=='"),
        ("http://host:8080/path", "authorization = 'Basic x'"),
        ("https://host", ""),
        ("memory:///", ""),
        ("/mnt/images", ""),
    ],
)
def test_each_kind_of_store_can_be_opened(url: str, options: str) -> None:
    (store,) = parse(f"[[store]]\nname = 'a'\nurl = '{url}'\n[store.options]\n{options}\n".encode())
    assert config.open_store(store).name == "a"


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (b"PLANTED [", "stores.toml", "is not TOML, at line 1"),
        (b"\xff", "stores.toml", "is not TOML"),
        (b"x = 1", "x", "is not known here; known are store"),
        (b"store = 1", "store", "must be a list"),
        (b"store = [1]", "store[0]", "must be a table"),
        (b"[[store]]", "store[0].name", "must be"),
        (b'[[store]]\nname = "Big"', "store[0].name", "must be"),
        (b'[[store]]\nname = "a"', "store[0].url", "must be an absolute path or an address"),
        (b'[[store]]\nname = "a"\nurl = "ftp://PLANTED"', "store[0].url", "must be"),
        (b'[[store]]\nname = "a"\nurl = "s3://a b\\u0007"', "store[0].url", "must be"),
        (b'[[store]]\nname = "a"\nurl = "relative"', "store[0].url", "must be"),
        (b'[[store]]\nname = "a"\nurl = "/a"\nsecret_key = "PLANTED"', "store[0].secret_key", "is not known here"),
        (b'[[store]]\nname = "a"\nurl = "/a"\nwritable = 1', "store[0].writable", "true or false"),
        (b'[[store]]\nname = "a"\nurl = "/a"\ndeadline_s = 0', "store[0].deadline_s", "number of seconds"),
        (b'[[store]]\nname = "a"\nurl = "/a"\nattempt_s = true', "store[0].attempt_s", "number of seconds"),
        (b'[[store]]\nname = "a"\nurl = "/a"\n[store.options]\nx = "PLANTED"', "store[0].options", "takes no options"),
        (b'[[store]]\nname = "a"\nurl = "s3://b"\n[store.options]\nx = 1', "store[0].options.x", "must be a string"),
        (b'[[store]]\nname = "a"\nurl = "s3://b"\n[store.options]\nno_such = "PLANTED"', "store[0].options", "does not know"),
        (b'[[store]]\nname = "a"\nurl = "https://b"\n[store.options]\nregion = "PLANTED"', "store[0].options", "only the option"),
        (b'[[store]]\nname = "a"\nurl = "az://b"\n[store.options]\naccount_key = "PLANTED"', "store[0].options", "cannot be set up"),
        (
            b'[[store]]\nname = "a"\nurl = "gs://b"\n[store.options]\nservice_account_key = "PLANTED"',
            "store[0].options",
            "cannot be set up",
        ),
        (b'[[store]]\nname = "a"\nurl = "s3://b"\n[store.options_from_env]\nregion = "UNSET"', "store[0].options_from_env.region", "UNSET"),
        (
            b'[[store]]\nname = "a"\nurl = "s3://b"\n[store.options]\nregion = "x"\n[store.options_from_env]\nregion = "TOKEN"',
            "store[0].options_from_env.region",
            "is given in options too",
        ),
        (b'[[store]]\nname = "a"\nurl = "https://b"\nca_file = "x"', "store[0].ca_file", "absolute path"),
        (b'[[store]]\nname = "a"\nurl = "https://b"\nca_file = "/nonexistent"', "store[0].ca_file", "cannot be read"),
        (b'[[store]]\nname = "a"\nurl = "https://b"\nca_file = "/etc/hostname"', "store[0].ca_file", "no certificates"),
        (b'[[store]]\nname = "a"\nurl = "/a"\n[[store]]\nname = "a"\nurl = "/b"', "store[1].name", "two stores"),
    ],
)
def test_mistakes_are_named_and_no_value_is_quoted(text: bytes, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(text)
    assert caught.value.field == field
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_file_is_no_store(tmp_path: Path) -> None:
    stores = config.load(tmp_path / "stores.toml")
    assert stores.infos() == ()
    with pytest.raises(NotFound, match="there is: none"):
        stores.get("team", field="reference")
    (tmp_path / "stores.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidRequest, match="larger than"):
        config.load(tmp_path / "stores.toml")


async def test_stores_are_opened_once(tmp_path: Path) -> None:
    (tmp_path / "stores.toml").write_bytes(GOOD)
    stores: Stores = config.load(tmp_path / "stores.toml", {"TOKEN": "x"})
    assert stores.get("mount") is stores.get("mount")
    assert "team" in stores and "x" not in stores
    assert stores.get("team").writable and not stores.get("web").writable
    await stores.close()
