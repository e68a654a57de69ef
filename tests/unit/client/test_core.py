# SPDX-License-Identifier: Apache-2.0
"""Requests and answers, without I/O."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api import routes, wire
from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound
from opendsec.api.exec import Captured, Command, ExecResult, Pty
from opendsec.api.files import Written
from opendsec.api.ids import check_action_id
from opendsec.client import _core
from opendsec.client.results import Result

BOX = {"sandbox_id": "sb_0123456789abcdef"}


def test_a_request_names_its_route() -> None:
    request = _core.request(routes.GET, BOX)
    assert (request.method, request.target, request.body, request.content_type) == ("GET", "/v1/sandboxes/sb_0123456789abcdef", b"", "")
    assert request.repeatable
    command = _core.request(routes.RUN, BOX, body=b"{}")
    assert command.content_type == "application/json" and not command.repeatable
    assert _core.request(routes.WRITE, BOX).content_type == "application/octet-stream"


def test_query_values_are_exact_bytes() -> None:
    query: _core.Query = {"path": b"/caf\xe9 &=?#+%/\n", "append": True, "parents": False, "offset": 7, "user": None}
    target = _core.request(routes.WRITE, BOX, query=query).target
    assert target.partition("&action_id=")[0].partition("?")[2] == "path=%2Fcaf%E9%20%26%3D%3F%23%2B%25%2F%0A&append=1&parents=0&offset=7"
    assert target.isascii() and "\n" not in target


# What they make is named by its content, so they may be sent again as they are.
REPEATABLE = ("IMAGE_BUILD", "IMAGE_PULL", "IMAGE_PUSH", "IMAGE_WARM")


def test_every_route_that_mutates_has_a_place_for_an_action_id() -> None:
    for name, route in routes.ROUTES.items():
        in_body = route.request is not None and "action_id" in route.request.__struct_fields__
        assert in_body + ("action_id" in route.query) == (route.mutates and name not in REPEATABLE), name


def test_a_request_with_an_action_id_in_its_query_is_repeatable() -> None:
    ids = {**BOX, "process_id": "proc_1", "session_id": "sess_1", "name": "pool.1"}
    for route in routes.ROUTES.values():
        if "action_id" in route.query:
            first, second = (_core.request(route, ids) for _ in range(2))
            assert first.repeatable and first.target != second.target
            given = _core.request(route, ids, query={"action_id": "mine/1"})
            assert given.target.endswith("?action_id=mine%2F1") and given == _core.request(route, ids, query={"action_id": "mine/1"})
            with pytest.raises(InvalidRequest):
                _core.request(route, ids, query={"action_id": "a b"})


@pytest.mark.parametrize("bad", ["", "../info", "a/b", "a b", "a?b", "a\r\nHost: x", "é", "x" * 129])
def test_ids_cannot_leave_their_place_in_the_path(bad: str) -> None:
    with pytest.raises(NotFound):
        _core.request(routes.GET, {"sandbox_id": bad})


def test_text_is_shell_and_a_sequence_is_argv() -> None:
    assert _core.command("echo hi", {}).shell == "echo hi"
    made = _core.command(["echo", "hi"], {"stdin": "é", "env": {"A": "1"}, "pty": True, "timeout_s": 3})
    assert (made.argv, made.stdin, made.env, made.pty, made.timeout_s) == (("echo", "hi"), "é".encode(), {"A": "1"}, Pty(), 3.0)
    assert _core.command("x", {"pty": False}).pty is None
    assert _core.command("x", {}, stdin_stream=True).stdin_mode == "stream"
    with pytest.raises(InvalidRequest, match="not both"):
        _core.command("x", {"stdin": "now"}, stdin_stream=True)


def test_action_ids_are_made_up_once_and_never_replaced() -> None:
    made = _core.command("x", {}).action_id
    assert made and check_action_id(made) == made and made != _core.command("x", {}).action_id
    assert _core.command("x", {"action_id": "mine"}).action_id == "mine"
    with pytest.raises(InvalidRequest):
        _core.command("x", {"action_id": ""})


def test_a_command_survives_the_wire() -> None:
    made = _core.command(["a", "\n\0x"[0]], {"stdin": b"\xff\x00", "env": {"B": "é"}})
    assert wire.decode(_core.encode(made), Command) == made


def test_answers_of_another_generation_are_our_own_fault() -> None:
    with pytest.raises(Internal):
        _core.read(200, b'{"bytes": 3}', Written)
    with pytest.raises(Internal):
        _core.read(502, b"<html>Bad gateway</html>", Written)
    with pytest.raises(Conflict, match="busy"):
        _core.read(409, wire.encode_error(Conflict("busy")), Written)
    with pytest.raises(NotFound):
        _core.read_line(wire.encode_error(NotFound("it went away")), Written)
    assert _core.read_line(b'{"size_bytes": 3}', Written) == Written(3)


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_come_out_as_they_went_in(lines: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, found = _core.LineReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += list(reader.feed(raw[start:end]))
    assert found == [line for line in lines if line.strip()]


def test_a_line_has_an_end_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "MAX_LINE_BYTES", 100)
    reader = _core.LineReader()
    with pytest.raises(Internal):
        for _ in range(20):
            list(reader.feed(b"x" * 10))


@given(st.text(), st.data())
def test_characters_are_never_split(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    decoder = _core.TextDecoder()
    found = "".join(decoder.feed(raw[start:end]) for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    assert found + decoder.flush() == raw.decode()


def test_an_unfinished_character_ends_as_a_mark() -> None:
    decoder = _core.TextDecoder()
    assert decoder.feed(b"a\xc3") == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(b"b") == "b"


@pytest.mark.parametrize(
    ("path", "raw"),
    [("/a/é", b"/a/\xc3\xa9"), (b"/\xff", b"/\xff"), ("/\udcff", b"/\xff"), (PurePosixPath("/x"), b"/x")],
)
def test_paths_are_bytes_in_the_end(path: _core.Path, raw: bytes) -> None:
    assert _core.raw_path(path) == raw


def test_when_a_request_is_sent_again() -> None:
    policy = _core.RetryPolicy(attempts=3)
    assert policy.again(1, sent=False, repeatable=False)  # it never left
    assert not policy.again(1, sent=True, repeatable=False)  # it may have run
    assert policy.again(2, sent=True, repeatable=True)
    assert not policy.again(3, sent=False, repeatable=True)
    assert all(policy.delay_s(attempt) <= policy.max_delay_s for attempt in range(1, 40))


def test_results_say_what_happened() -> None:
    def result(**fields: object) -> Result:
        return Result(ExecResult(**{"outcome": "exited", "process_id": "p", **fields}), "make")  # type: ignore[arg-type]

    assert result(exit_code=0).ok and result(exit_code=0).check().shell_code() == 0
    assert result(exit_code=5).shell_code() == 5
    assert result(outcome="signalled", signal=9).shell_code() == 137
    assert result(outcome="timed_out", signal=9).shell_code() == 124
    assert result(outcome="memory_limit").shell_code() == 137
    assert result(outcome="not_started", message="no such program: x").shell_code() == 127
    assert result(outcome="not_started", message="permission denied").shell_code() == 126
    assert result(outcome="unknown").shell_code() == 125
    with pytest.raises(Exception, match="make exited with 5"):
        result(exit_code=5).check()
    kept = result(stdout=Captured(head=b"a\xff", tail=b"z", total_bytes=10))
    assert kept.truncated and kept.stdout_total_bytes == 10 and kept.stdout.startswith("a\ufffd") and kept.stdout_bytes.endswith(b"z")
