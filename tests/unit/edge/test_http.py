# SPDX-License-Identifier: Apache-2.0
"""Requests are parsed strictly; every route of the contract has a handler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.routes import ROUTES
from opendsec.edge.http import Answer, Message, Request, Router, parse_query


async def nothing(request: Request) -> Answer:
    return None


@pytest.fixture
def router() -> Router:
    return Router(dict.fromkeys(ROUTES, nothing))


async def never() -> Message:
    raise AssertionError("nobody asked for a body")


def request(**query: bytes) -> Request:
    return Request(ROUTES["INFO"], (), query, never, 0, True)


def test_each_route_is_found_with_its_parameters(router: Router) -> None:
    for route in ROUTES.values():
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        path = route.path.replace("{", "<").replace("}", ">")
        found, _, query, params = router.find(route.method, path)
        assert found is route
        assert params == tuple(f"<{name}>" for name in names)
        assert query == frozenset(route.query)


def test_a_route_without_handler_is_a_mistake_of_ours() -> None:
    handlers = dict.fromkeys(ROUTES, nothing)
    del handlers["RUN"]
    with pytest.raises(ValueError, match=r"routes without handler: \['RUN'\]"):
        Router(handlers)
    with pytest.raises(ValueError, match=r"handlers without route: \['JUMP'\]"):
        Router({**dict.fromkeys(ROUTES, nothing), "JUMP": nothing})


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "//v1/info", "/v1/info/", "/v1//info", "/v1/sandboxes//run", "/v1/sandboxes/x/y/z"]
)
def test_other_paths_are_not_found(router: Router, path: str) -> None:
    with pytest.raises(NotFound):
        router.find("GET", path)


def test_other_methods_are_refused(router: Router) -> None:
    with pytest.raises(InvalidRequest, match="must be one of GET, POST for this path"):
        router.find("DELETE", "/v1/sandboxes")


@given(st.text(max_size=40), st.text(max_size=200))
def test_the_router_refuses_or_finds(method: str, path: str) -> None:
    try:
        Router(dict.fromkeys(ROUTES, nothing)).find(method, path)
    except (NotFound, InvalidRequest):
        pass


def test_query_values_are_raw_bytes() -> None:
    allowed = frozenset(("path", "to"))
    assert parse_query(b"path=/caf%E9%00%2B+x&to=", allowed) == {"path": b"/caf\xe9\x00+ x", "to": b""}
    assert parse_query(b"&&path=a", allowed) == {"path": b"a"}


@pytest.mark.parametrize(("query", "field"), [(b"a=1", "a"), (b"path=1&path=1", "path"), (b"%ff=1", "\ufffd"), (b"=1", "query")])
def test_other_query_parameters_are_refused(query: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_query(query, frozenset(("path",)))
    assert error.value.field == field


@given(st.binary(max_size=300))
def test_any_query_is_parsed_or_refused(query: bytes) -> None:
    try:
        parsed = parse_query(query, frozenset(("path", "mode")))
    except InvalidRequest:
        return
    assert set(parsed) <= {"path", "mode"}


def test_typed_parameters() -> None:
    asked = request(n=b"12", o=b"644", f=b"1.5", yes=b"true", no=b"0", t=b"caf\xc3\xa9")
    assert asked.integer("n", (0, 20)) == 12
    assert asked.integer("o", (0, 0o7777), base=8) == 0o644
    assert asked.integer("absent", (0, 20)) is None
    assert asked.number("f", (0, 2)) == 1.5
    assert (asked.flag("yes"), asked.flag("no"), asked.flag("absent")) == (True, False, False)
    assert asked.text("t") == "café"


@pytest.mark.parametrize("value", [b"", b"-1", b"21", b"1e3", b"0x1", b" 1", b"1_0", "١".encode(), b"9" * 5000])
def test_wrong_integers(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a whole number from 0 to 20"):
        request(n=value).integer("n", (0, 20))


@pytest.mark.parametrize("value", [b"", b"nan", b"inf", b"-1", b"x"])
def test_wrong_numbers(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a number from 0 to 20"):
        request(n=value).number("n", (0, 20))


@pytest.mark.parametrize("value", [b"", b"a", b"/" + b"x" * 256, b"/" + b"x/" * 2100, b"/a\0"])
def test_wrong_paths(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        request(path=value).path("path")


async def test_bodies_arrive_in_parts() -> None:
    parts = iter([{"body": b"ab", "more_body": True}, {"body": b"", "more_body": True}, {"body": b"c"}])

    async def receive() -> Message:
        return {"type": "http.request", **next(parts)}

    asked = Request(ROUTES["INFO"], (), {}, receive, None, True)
    assert [chunk async for chunk in asked.chunks()] == [b"ab", b"c"]
    assert [chunk async for chunk in asked.chunks()] == []
