# SPDX-License-Identifier: Apache-2.0
"""`stores.toml`: the remote stores that the edge's operator has configured.

    [[store]]
    name = "team"                        # as in `store:team/NAME`
    url = "s3://bucket/prefix"           # file:///mnt/3fs/images, gs://…, az://…, https://…
    writable = true                      # default: false
    attempt_s = 10.0                     # wait so long for one answer
    deadline_s = 60.0                    # give up after so long, with all retries
    ca_file = "/etc/ssl/site.pem"        # trust these certificates too

    [store.options]                      # what the store needs: region, endpoint, credentials; for https://: authorization
    region = "eu-1"

    [store.options_from_env]             # the same, from variables of the edge's environment
    secret_access_key = "TEAM_STORE_SECRET"

Credentials may also come the way the store's own tools take them (AWS_*, GOOGLE_*, AZURE_* variables, instance roles). They are in no
`repr`, no error and no log.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.images import StoreInfo
from opendsec.images.origins import is_store_name
from opendsec.images.remote import objects
from opendsec.images.remote.objects import ObjectStore
from opendsec.images.remote.posix import PosixStore
from opendsec.images.remote.retry import Patience, Patient
from opendsec.images.remote.store import RemoteStore

FILE = "stores.toml"

_MAX_BYTES = 1 << 20
_OBJECT_SCHEMES = ("s3", "gs", "az", "http", "https", "memory")
_HIDDEN = re.compile(r"[^\x20-\x7e]")


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One store. Its `repr` has no credentials."""

    name: str
    url: str  # may have a password in it: show `public_url`
    writable: bool = False
    options: Mapping[str, str] = {}
    patience: Patience = Patience()
    ca: bytes = b""

    @property
    def public_url(self) -> str:
        if path := _directory(self.url):
            return f"file://{path}"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def __repr__(self) -> str:
        return f"StoreConfig(name={self.name!r}, url={self.public_url!r}, writable={self.writable}, options=<{len(self.options)}>)"

    __rich_repr__ = None  # type: ignore[assignment]  # msgspec's would show all fields

    def info(self) -> StoreInfo:
        return StoreInfo(name=self.name, url=self.public_url, writable=self.writable)


class Stores:
    """The configured stores, each opened when first used."""

    def __init__(self, configs: Mapping[str, StoreConfig]) -> None:
        self._configs = dict(configs)
        self._open: dict[str, RemoteStore] = {}

    def infos(self) -> tuple[StoreInfo, ...]:
        return tuple(config.info() for config in self._configs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._configs

    def get(self, name: str, *, field: str | None = None) -> RemoteStore:
        """Raises NotFound."""
        if name not in self._configs:
            known = ", ".join(sorted(self._configs)) or "none"
            raise NotFound(f"no store {name[:80]!r} is configured on this edge; there is: {known}", field=field)
        if name not in self._open:
            self._open[name] = open_store(self._configs[name])
        return self._open[name]

    async def close(self) -> None:
        for store in self._open.values():
            await store.close()
        self._open.clear()


def open_store(config: StoreConfig) -> RemoteStore:
    """Nothing is sent yet. Raises InvalidRequest (the configuration was checked when loaded, so a changed environment only)."""
    if path := _directory(config.url):
        return Patient(PosixStore(config.name, Path(path), writable=config.writable), config.patience)
    try:
        backend = objects.connect(config.url, config.options, attempt_s=config.patience.attempt_s, ca=config.ca)
    except objects.BadOptions as error:
        why = str(error)
    else:
        web = config.url.startswith(("http:", "https:"))
        return Patient(ObjectStore(config.name, backend, writable=config.writable, multipart=not web), config.patience)
    raise InvalidRequest(why, field=f"store {config.name}")


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Stores:
    """The stores of a `stores.toml`; none if there is no such file. Raises InvalidRequest naming the field."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Stores({})
    if len(data) > _MAX_BYTES:
        raise InvalidRequest(f"{path.name} is larger than {_MAX_BYTES} bytes")
    return Stores({config.name: config for config in parse(data, environ)})


def parse(data: bytes, environ: Mapping[str, str]) -> list[StoreConfig]:
    """Raises InvalidRequest naming the field; values of options are never quoted."""
    line: str | None = None
    document: dict[str, object] = {}
    try:
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError:
        line = "?"
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))  # the rest may quote what stands there
        line = found[1] if found else "?"
    if line is not None:
        raise InvalidRequest(f"is not TOML, at line {line}", field=FILE)
    _only(document, {"store"}, "")
    entries = document.get("store", [])
    if not isinstance(entries, list):
        raise InvalidRequest("must be a list of tables: [[store]]", field="store")
    configs: list[StoreConfig] = []
    for index, entry in enumerate(entries):
        config = _store(entry, f"store[{index}]", environ)
        if any(config.name == other.name for other in configs):
            raise InvalidRequest(f"there are two stores {config.name!r}", field=f"store[{index}].name")
        configs.append(config)
    return configs


def _store(entry: object, at: str, environ: Mapping[str, str]) -> StoreConfig:
    if not isinstance(entry, dict):
        raise InvalidRequest("must be a table: [[store]]", field=at)
    _only(entry, {"name", "url", "writable", "attempt_s", "deadline_s", "ca_file", "options", "options_from_env"}, at)
    name, url, writable = entry.get("name"), entry.get("url"), entry.get("writable", False)
    if not isinstance(name, str) or not is_store_name(name):
        raise InvalidRequest("must be at most 63 of a-z, 0-9, - and _, a letter or digit first", field=f"{at}.name")
    if not isinstance(url, str) or not url or _HIDDEN.search(url) or not (_directory(url) or _scheme(url) in _OBJECT_SCHEMES):
        raise InvalidRequest(f"must be an absolute path or an address of {', '.join(_OBJECT_SCHEMES)} or file", field=f"{at}.url")
    if not isinstance(writable, bool):
        raise InvalidRequest("must be true or false", field=f"{at}.writable")
    options = _strings(entry.get("options", {}), f"{at}.options")
    for option, variable in _strings(entry.get("options_from_env", {}), f"{at}.options_from_env").items():
        if option in options:
            raise InvalidRequest("is given in options too", field=f"{at}.options_from_env.{option}")
        if variable not in environ:
            raise InvalidRequest(f"the variable {variable} is not set in the edge's environment", field=f"{at}.options_from_env.{option}")
        options[option] = environ[variable]
    if options and _directory(url):
        raise InvalidRequest("a directory takes no options", field=f"{at}.options")
    patience = Patience(attempt_s=_seconds(entry, "attempt_s", 10.0, at), deadline_s=_seconds(entry, "deadline_s", 60.0, at))
    config = StoreConfig(name=name, url=url, writable=writable, options=options, patience=patience, ca=_certificates(entry, at))
    if not _directory(url):
        why = ""
        try:
            objects.connect(url, options, attempt_s=1.0, ca=config.ca)
        except objects.BadOptions as error:
            why = str(error)
        if why:
            raise InvalidRequest(why, field=f"{at}.options")
    return config


def _only(table: Mapping[str, object], known: set[str], at: str) -> None:
    for key in table:
        if key not in known:
            field = f"{at}.{key[:80]}" if at else key[:80]
            raise InvalidRequest(f"is not known here; known are {', '.join(sorted(known))}", field=field)


def _strings(value: object, at: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidRequest("must be a table of strings", field=at)
    for key, text in value.items():
        if not isinstance(text, str):
            raise InvalidRequest("must be a string", field=f"{at}.{key[:80]}")
    return dict(value)


def _certificates(entry: Mapping[str, object], at: str) -> bytes:
    path = entry.get("ca_file", "")
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise InvalidRequest("must be an absolute path", field=f"{at}.ca_file")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot be read: {error.strerror}", field=f"{at}.ca_file") from None
    if b"-----BEGIN CERTIFICATE-----" not in data or len(data) > _MAX_BYTES:
        raise InvalidRequest("has no certificates in PEM form", field=f"{at}.ca_file")
    return data


def _seconds(entry: Mapping[str, object], key: str, default: float, at: str) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 3600:
        raise InvalidRequest("must be a number of seconds, 0.1 to 3600", field=f"{at}.{key}")
    return float(value)


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _directory(url: str) -> str:
    """The path of a store that is a directory; "" if it is none."""
    path = url.removeprefix("file://")
    return path if path.startswith("/") else ""
