# SPDX-License-Identifier: Apache-2.0
"""OCI's rules on the tree in memory. What the kernel shows of it is in tests/integration/oci."""

from __future__ import annotations

import io
import tarfile

import pytest

from opendsec.images.oci.limits import Limits
from opendsec.images.oci.nodes import Below, Inode, LayerTree, Question
from opendsec.images.oci.tarstream import BadLayer, TarStream
from tests.oci_layouts import archive, entry, folder, hard_link, symlink

Item = tuple[tarfile.TarInfo, bytes]


def tree(*layers: list[Item]) -> LayerTree:
    made = LayerTree(Limits())
    for number, items in enumerate(layers):
        if number:
            made.next_layer()
        for item in TarStream(io.BytesIO(archive(*items)).read, Limits()):
            made.add(item)
    return made


def shape(inode: Inode) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, slot in inode.children.items():
        text = name.decode()
        if slot.inode.is_directory:
            found[text + ("!" if slot.inode.opaque else "/")] = shape(slot.inode)
        else:
            found[text] = "gone" if slot.inode.is_whiteout else slot.inode.target.decode() or "file"
    return found


def whole(made: LayerTree, below: dict[bytes, Below | None] | None = None) -> dict[str, object]:
    while questions := made.questions():
        made.answer({question.path: (below or {}).get(question.path) for question in questions})
    made.finish()
    return shape(made.root)


HERE: dict[bytes, Below | None] = {b"": Below(), b"a": Below(mode=0o1777, uid=3), b"a/b": Below()}


def test_whiteouts_stay_where_something_is_below() -> None:
    items = [entry("a/.wh.x"), entry("n/.wh.x"), entry(".wh.y")]
    assert whole(tree(items), HERE) == {"a/": {"x": "gone"}, "n/": {}, "y": "gone"}
    assert whole(tree(items)) == {"a/": {}, "n/": {}}


@pytest.mark.parametrize("order", [1, -1])
def test_hidden_and_made_again(order: int) -> None:
    assert whole(tree([entry("a/.wh.b"), entry("a/b/c")][::order]), HERE) == {"a/": {"b!": {"c": "file"}}}
    assert whole(tree([entry("a/.wh.b"), entry("a/b")][::order]), HERE) == {"a/": {"b": "file"}}


def test_a_later_layer_hides_what_an_earlier_of_the_group_had() -> None:
    made = tree([entry("a/x"), entry("a/b/y")], [entry("a/.wh.x"), entry("a/b/.wh..wh..opq"), entry("a/b/z")])
    assert whole(made, HERE) == {"a/": {"x": "gone", "b!": {"z": "file"}}}


def test_a_later_layer_may_use_what_an_earlier_of_the_group_had() -> None:
    made = tree([entry("a/x"), folder("real")], [hard_link("y", "a/x"), symlink("l", "real")], [entry("l/z")])
    assert whole(made) == {"a/": {"x": "file"}, "real/": {"z": "file"}, "y": "file", "l": "real"}
    assert made.root.children[b"y"].inode is made.root.children[b"a"].inode.children[b"x"].inode


def test_attributes_of_directories_that_are_only_passed() -> None:
    made = tree([entry("a/x")])
    assert set(made.questions()) == {Question(b"", True), Question(b"a", True)}
    whole(made, HERE)
    passed = made.root.children[b"a"].inode
    assert (passed.mode & 0o7777, passed.uid) == (0o1777, 3)


def test_a_directory_made_new_takes_nothing_from_below() -> None:
    made = tree([entry(".wh.a"), entry("a/x")])
    assert [question.path for question in made.questions()] == [b""]


def test_what_lies_in_an_opaque_directory_has_nothing_below() -> None:
    made = tree([folder("a"), entry("a/.wh..wh..opq"), entry("a/b/c"), entry("a/b/.wh.d")])
    assert [question.path for question in made.questions()] == [b""]
    assert whole(made, HERE) == {"a!": {"b/": {"c": "file"}}}


def test_a_link_of_a_lower_layer_in_the_way() -> None:
    below = {b"": Below(), b"lib": Below(link=b"usr/lib"), b"usr": Below(), b"usr/lib": Below(mode=0o711)}
    made = tree([entry("lib/x"), entry("lib/.wh.y"), entry("usr/lib/z")])
    assert whole(made, below) == {"usr/": {"lib/": {"x": "file", "y": "gone", "z": "file"}}}
    assert made.root.children[b"usr"].inode.children[b"lib"].inode.mode & 0o777 == 0o711


def test_a_link_of_a_lower_layer_that_leads_to_another() -> None:
    below = {b"": Below(), b"a": Below(link=b"b"), b"b": Below(link=b"c/d")}
    assert whole(tree([entry("a/x")]), below) == {"c/": {"d/": {"x": "file"}}}


def test_replacing_a_directory_that_the_way_just_led_through() -> None:
    assert whole(tree([entry("a/b/x"), entry("a", b"f"), folder("a"), entry("a/b/y")])) == {"a!": {"b/": {"y": "file"}}}


def test_notes_are_bounded() -> None:
    made = tree([entry(f"dev/{number}", kind=tarfile.CHRTYPE) for number in range(150)])
    assert len(made.all_notes()) == 101
    assert made.all_notes()[-1] == "and 50 more of such"


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([entry("./", b"x", kind=tarfile.FIFOTYPE)], "root that is no directory"),
        ([entry("a/.wh.")], "whiteout of nothing"),
        ([entry(".wh...")], "whiteout of nothing"),
        ([entry(".wh.a/b")], "inside a whiteout"),
        ([entry("a"), entry("a/b/c")], "goes through a file"),
        ([hard_link("a", "../b")], "leads upwards"),
        ([hard_link("a", ".")], "hard link to a directory"),
        ([hard_link("a", "a")], "not in the layer"),
        ([symlink("a", "")], "link to nothing"),
        ([entry("a", uid=65_536)], "ids go up to"),
    ],
)
def test_refused(items: list[Item], said: str) -> None:
    with pytest.raises(BadLayer, match=said):
        tree(items)
