# SPDX-License-Identifier: Apache-2.0
"""References of images: every form, what is refused, and what an image is called here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import Denied, InvalidRequest
from opendsec.api.images import PackRequest, PullRequest, PushRequest, TraceRequest
from opendsec.api.references import (
    Reference,
    check_content_name,
    check_pull,
    check_push,
    check_trace,
    pack_names,
    parse_reference,
)

DIGEST = "sha256:" + "0a" * 32

GOOD = {
    "docker://registry.test/team/tool:1.2": (
        Reference(transport="docker", place="registry.test", name="team/tool", tag="1.2"),
        "team/tool:1.2",
    ),
    "docker://127.0.0.1:5000/a": (Reference(transport="docker", place="127.0.0.1:5000", name="a"), "a"),
    "docker://localhost/a__b/c-d.e": (Reference(transport="docker", place="localhost", name="a__b/c-d.e"), "a__b/c-d.e"),
    "docker://[::1]:5000/a:T_1": (Reference(transport="docker", place="[::1]:5000", name="a", tag="T_1"), "a:T_1"),
    f"docker://r.test/a@{DIGEST}": (Reference(transport="docker", place="r.test", name="a", digest=DIGEST), "a"),
    "oci:/srv/My Images": (Reference(transport="oci", place="/srv/My Images"), "my-images"),
    "oci:/srv/x:v1": (Reference(transport="oci", place="/srv/x", tag="v1"), "x:v1"),
    "docker-archive:/t/Saved.tar": (Reference(transport="docker-archive", place="/t/Saved.tar"), "saved"),
    "docker-archive:/t/a.tar:team/b:2": (Reference(transport="docker-archive", place="/t/a.tar", name="team/b", tag="2"), "team/b:2"),
    "docker-archive:/t/a.tar:localhost:5000/b:2": (
        Reference(transport="docker-archive", place="/t/a.tar", name="localhost:5000/b", tag="2"),
        "b:2",
    ),
    "store:depot/python:3.12": (Reference(transport="store", place="depot", name="python:3.12"), "python:3.12"),
}

BAD = [
    "",
    "debian",
    "docker://",
    "docker://debian",
    "docker://debian/x",  # whose host?
    "docker://r.test/",
    "docker://r.test/UPPER",
    "docker://r.test/../x",
    "docker://r.test/a:",
    "docker://r.test/a@sha256:12",
    f"docker://r.test/a:t@{DIGEST}",
    "docker://user:password@r.test/a",
    "docker://r.test/a b",
    "docker://r.test/a?x=1",
    "docker:/r.test/a",
    "oci:relative/path",
    "oci:/",
    "oci:",
    "oci:/a/../b",
    "oci:/a:b:c",
    "oci:/" + "x" * 256,
    "oci:/a\nb",
    "oci:/a\0b",
    "docker-archive:/a.tar:UPPER",
    "docker-archive:a.tar",
    "store:depot",
    "store:De pot/x",
    "store:../x",
    "store:depot/../x",
    "store:depot/Upper",
    "docker-daemon:x",
    "containers-storage:x",
    "dir:/x",
    "https://r.test/x",
    "x" * 9000,
]


@pytest.mark.parametrize("text", GOOD)
def test_good(text: str) -> None:
    expected, name = GOOD[text]
    found = parse_reference(text)
    assert (found, found.image_name) == (expected, name)
    assert str(found) == text and parse_reference(str(found)) == found
    assert check_content_name(found.image_name, "name")


@pytest.mark.parametrize("text", BAD)
def test_bad(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text, "where")
    assert caught.value.field == "where" and len(caught.value.message) < 300


@given(
    st.text(max_size=60).flatmap(
        lambda rest: st.sampled_from(["docker://", "oci:", "docker-archive:", "store:", ""]).map(lambda t: t + rest)
    )
)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse_reference(text)
    except InvalidRequest:
        return
    assert parse_reference(str(found)) == found
    assert check_content_name(found.image_name, "name")
    assert ".." not in found.place.split("/")


def test_paths_only_from_this_machine() -> None:
    for text in ("oci:/x", "docker-archive:/x"):
        check_pull(PullRequest(reference=text), local=True)
        with pytest.raises(Denied):
            check_pull(PullRequest(reference=text), local=False)
        with pytest.raises(Denied):
            check_push(PushRequest(name="a", reference=text), local=False)
    assert check_pull(PullRequest(reference="store:a/b"), local=False).place == "a"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PullRequest(reference="docker://r.test/a", name="UPPER"), "name"),
        (PullRequest(reference="docker://r.test/a", platform="amd64"), "platform"),
        (PullRequest(reference="docker://r.test/a", platform="windows/amd64"), "platform"),
        (PullRequest(reference="docker://r.test/a", token="SECRET\nvalue"), "token"),
        (PullRequest(reference="oci:/a", token="SECRET"), "token"),
        (PullRequest(reference="docker://r.test/a", token="SECRET" * 4000), "token"),
    ],
)
def test_pull_fields(request_: PullRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_pull(request_, local=True)
    assert caught.value.field == field and "SECRET" not in str(caught.value)


def test_a_push_goes_to_a_tag() -> None:
    with pytest.raises(InvalidRequest):
        check_push(PushRequest(name="a", reference=f"docker://r.test/a@{DIGEST}"), local=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "x"}, "name"),
        ({"name": "x@"}, "name"),
        ({"name": "X@1"}, "name"),
        ({"name": "x@1+2"}, "name"),
        ({"name": "workspace:x@1"}, "name"),
        ({"kind": "base"}, "kind"),
        ({"scrub_paths": ("tmp/*",)}, "scrub_paths[0]"),
        ({"keep_paths": ("/ok", "/a/../b")}, "keep_paths[1]"),
        ({"scrub_paths": ("/x",) * 257}, "scrub_paths"),
        ({"packages": ("a b",)}, "packages[0]"),
        ({"action_id": "a b"}, "action_id"),
    ],
)
def test_pack_fields(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pack_names(PackRequest(**{"name": "x@1", **fields}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_pack_names() -> None:
    assert pack_names(PackRequest(name="team/astropy@4f2c", scrub_paths=("/root/*.log",))) == ("team/astropy", "4f2c")


@pytest.mark.parametrize("argv", [(), ("",), ("a\0",)])
def test_trace_fields(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_trace(TraceRequest(name="a", argv=argv))
    assert caught.value.field is not None and caught.value.field.startswith("argv")
