# SPDX-License-Identifier: Apache-2.0
"""guestd on commands, run as a service on this machine in namespaces and a cgroup of its own."""

from __future__ import annotations

import errno
import os
import signal
import struct
import time
from collections.abc import Iterator

import pytest

from tests.guestd import HEADER, Command, Guest, GuestError, N, Payload, cgroup2, service, text, texts

pytestmark = pytest.mark.skipif(cgroup2() is None, reason="no cgroup2 hierarchy is mounted here")
TREE, SINCE_MARK = 1, 2


@pytest.fixture
def guest() -> Iterator[Guest]:
    with service() as guest:
        guest.hello()
        yield guest
        nothing_left(guest)


def nothing_left(guest: Guest) -> None:
    """What was killed or let go of a moment ago may still be ending."""
    deadline = time.monotonic() + 10
    while guest.ask("COMMANDS").take("I") != (0,):
        assert time.monotonic() < deadline, "a command was left"


def end(command: Command) -> None:
    command.signal(signal.SIGKILL, TREE)
    command.exit()
    command.tree_empty()
    command.release()


def refused(guest: Guest, name: str, payload: bytes = b"") -> int:
    with pytest.raises(GuestError) as caught:
        guest.ask(name, payload)
    return int(caught.value.args[0])


# --- the connection --------------------------------------------------------------------------------------------------


def test_hello_begins_anew_and_commands_live_on(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "cat; sleep 1000"], name="p1")
    guest.hello()
    payload = guest.ask("COMMANDS")
    assert payload.take("I") == (1,)
    assert (payload.text(), *payload.take("QI")) == (b"p1", command.id, 7)  # it runs, its tree is there, and it is released
    assert guest.ask("CUT", texts(["p1", "other"])).take("I") == (1,)


def test_an_unknown_version_is_refused_with_the_newest_known(guest: Guest) -> None:
    with pytest.raises(GuestError) as caught:
        guest.ask("HELLO", struct.pack("<II", 99, 0) + bytes(16))
    assert caught.value.args == (errno.EPROTONOSUPPORT, "1")


def test_after_a_broken_header_nothing_counts_until_hello(guest: Guest) -> None:
    guest.sock.sendall(b"x" * 500)
    with pytest.raises(GuestError) as caught:
        guest.next(0, 0)
    assert caught.value.args[0] == errno.EPROTO
    guest.send(N["TYPE_PING"], b"unheard")
    guest.hello()
    assert guest.ask("PING", b"heard").data == b"heard"
    assert not guest.events


def test_who_takes_over_amid_a_frame_is_heard_after_zeros(guest: Guest) -> None:
    guest.sock.sendall(HEADER.pack(N["GUEST_MAGIC"], 60_000, N["TYPE_EXEC"], 0, 0, 7) + bytes(100))
    guest.sock.sendall(bytes(N["HEADER_BYTES"] + N["MAX_PAYLOAD"]))
    guest.hello()
    assert guest.ask("PING", b"x").data == b"x"


def test_answers_that_nobody_reads_for_a_while_all_come(guest: Guest) -> None:
    path = text("/proc/self/" + "./" * 1500)
    requests = [guest.send(N["TYPE_MKDIR"], struct.pack("<II", 2, 0) + text("") + path, id=number) for number in range(1, 151)]
    commands = [guest.exec_id(["true"]) for _ in range(20)]
    names = [guest.send(N["TYPE_COMMANDS"]) for _ in range(600)]
    for id in (*requests, *commands, *names):
        while not any(event[2] == id for event in guest.events):
            guest.events.append(guest.frame())
    for id in commands:
        guest.next(N["TYPE_EXIT"], id)
        guest.ask("RELEASE", struct.pack("<Q", id))


def test_parked_it_says_nothing_until_unpark(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "cat; echo more; exit 3"])
    guest.ask("PARK")
    guest.sock.settimeout(0.2)
    command.eof()  # against the rules: not heard
    with pytest.raises(TimeoutError):
        guest.frame()
    guest.sock.settimeout(10)
    nonce = os.urandom(16)
    assert guest.ask("UNPARK", nonce).data == nonce
    command.eof()
    assert command.exit()[:2] == (0, 3)
    assert command.output() == b"more\n"
    command.release()


def test_requests_in_parts_and_malformed_ones(guest: Guest) -> None:
    code, output = guest.run(["sh", "-c", "echo ${#A} $#; exit 4", "sh", *["x" * 1000] * 300], env=["A=" + "y" * 100_000])
    assert (code, output) == (4, b"100000 300\n")
    assert refused(guest, "EXEC", b"") == errno.EINVAL
    assert refused(guest, "EXEC", bytes(70_000)) == errno.EINVAL
    assert refused(guest, "SIGNAL", struct.pack("<QII", 5, 9, 0)) == errno.ESRCH
    assert refused(guest, "SIGNAL", b"short") == errno.EINVAL
    guest.send(0x7777, id=99)
    with pytest.raises(GuestError) as caught:
        guest.next(0x7777, 99)
    assert caught.value.args[0] == errno.ENOSYS


# --- commands --------------------------------------------------------------------------------------------------------


def test_streams_of_any_number_and_the_ends_that_exit_tells(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "cat <&3 >&4; echo out; echo err >&2; exit 7"], kinds=b"\0\2\2\1\2")
    command.send(b"three", 3)
    command.eof(3)
    kind, code, rest = command.exit()
    assert (kind, code, rest["ends"]) == (0, 7, (0, 4, 4, 0, 5))
    assert [command.output(number) for number in (1, 2, 4)] == [b"out\n", b"err\n", b"three"]
    command.tree_empty()
    command.release()


def test_output_stops_where_there_is_no_credit_and_nothing_else_does(guest: Guest) -> None:
    guest.auto_credit = False
    command = guest.exec(["sh", "-c", "yes | head -c 1000000"])
    got = b""
    while len(got) < N["INITIAL_CREDIT"]:
        got += command.next_of(1) or b""
    assert len(got) == N["INITIAL_CREDIT"]
    assert guest.ask("PING", b"alive").data == b"alive"
    assert not [event for event in guest.events if event[0] == N["TYPE_DATA"]]
    guest.auto_credit = True
    guest.send(N["TYPE_CREDIT"], struct.pack("<I", N["INITIAL_CREDIT"]), flags=1, id=command.id)
    assert len(got + command.output()) == 1_000_000
    end(command)


def test_input_is_taken_as_the_command_reads_it(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "read x; cat | wc -c"])
    data = os.urandom(300_000).replace(b"\n", b"x")
    credit = N["INITIAL_CREDIT"]
    sent = 0
    data = b"go\n" + data
    while sent < len(data):
        if not credit:
            credit += struct.unpack("<I", guest.next(N["TYPE_CREDIT"], command.id)[1])[0]
        part = data[sent : sent + min(credit, 65_536)]
        command.send(part)
        sent += len(part)
        credit -= len(part)
    command.eof()
    assert command.exit()[:2] == (0, 0)
    assert command.output() == b"300000\n"
    command.release()


def test_data_without_credit_breaks_the_channel_until_hello(guest: Guest) -> None:
    command = guest.exec(["sleep", "1000"], name="p2")
    for _ in range(5):  # one or two go into the pipe, and are given back
        command.send(bytes(65_536))
    with pytest.raises(GuestError) as caught:
        guest.next(0, 0)
    assert caught.value.args[0] == errno.EPROTO
    guest.hello()
    guest.ask("CUT", texts(["p2"]))


def test_ends_of_readers_are_told_in_both_directions(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "exec 0<&-; sleep 1000"])
    assert struct.unpack("<I", guest.next(N["TYPE_CLOSE"], command.id)[1]) == (errno.EPIPE,)
    end(command)
    command = guest.exec(["sh", "-c", "while echo x; do :; done 2>/dev/null; exit 9"])
    guest.send(N["TYPE_CLOSE"], struct.pack("<I", 0), flags=1, id=command.id)
    kind, code, _ = command.exit()
    assert (kind, code) in ((1, signal.SIGPIPE), (0, 9))
    command.release()


def test_users_directories_limits_and_environment(guest: Guest) -> None:
    code, output = guest.run(
        ["sh", "-c", 'echo "$HOME $USER $LOGNAME $PATH $X"; pwd; id -u; id -g; ulimit -n'],
        user="nobody",
        cwd="/tmp",
        env=["X=1"],
        open_files=64,
    )
    lines = output.decode().splitlines()
    assert lines[0].endswith(" nobody nobody /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin 1")
    assert lines[1:] == ["/tmp", "65534", "65534", "64"] and code == 0
    assert guest.run(["sh", "-c", "id -u; id -g; echo $HOME"], user="1234:5")[1] == b"1234\n5\n/\n"
    assert guest.run(["id", "-u"])[1] == b"0\n"


@pytest.mark.parametrize(
    ("argv", "options", "code"),
    [
        (["no-such-program"], {}, errno.ENOENT),
        (["/etc/passwd"], {}, errno.EACCES),
        (["true"], {"cwd": "/no/such/directory"}, errno.ENOENT),
        (["true"], {"user": "no-such-user"}, errno.ENOENT),
        (["true"], {"name": "../x"}, errno.EINVAL),
        (["true"], {"kinds": b"\1\2"}, errno.EINVAL),
    ],
)
def test_what_cannot_start_is_told_and_leaves_nothing(guest: Guest, argv: list[str], options: dict[str, str], code: int) -> None:
    with pytest.raises(GuestError) as caught:
        guest.exec(argv, **options)  # type: ignore[arg-type]
    assert caught.value.args[0] == code


def test_only_its_own_descriptors_reach_a_command(guest: Guest) -> None:
    _, output = guest.run(["ls", "/proc/self/fd"])
    assert output == b"0\n1\n2\n3\n"  # the last is ls's own
    _, output = guest.run(["sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status"])
    assert set(output.split()) == {b"SigBlk:", b"SigIgn:", b"0000000000000000"}


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_command_ends_with_its_process_and_its_tree_later(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "setsid sh -c 'trap \"\" TERM HUP; sleep 1000' & exit 0"])
    assert command.exit()[2]["alive"] == 1
    assert command.ask("MEMBERS").take("I")[0] >= 1
    assert command.signal(signal.SIGKILL, TREE) >= 1
    command.tree_empty()
    assert command.ask("MEMBERS").take("I") == (0,)
    command.release()


def test_a_mark_spares_who_was_there(guest: Guest) -> None:
    script = "sleep 1001 & echo $!; read x; sleep 1002 & sleep 1003 & echo ready; wait"
    command = guest.exec(["bash", "-c", script])
    assert command.next_of(1) is not None
    assert command.ask("MARK").take("I") == (2,)
    command.send(b"go\n")
    assert command.next_of(1) == b"ready\n"
    assert command.signal(signal.SIGKILL, SINCE_MARK) == 2
    while command.ask("MEMBERS").take("I")[0] > 2:
        pass  # they are dying
    assert command.signal(0, TREE) == 2
    end(command)


def test_signals_reach_one_or_all(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.01; done"])
    assert command.next_of(1) == b"up\n"
    assert command.signal(signal.SIGUSR1) == 1
    assert command.exit()[:2] == (0, 5)
    command.release()
    command = guest.exec(["sleep", "1000"])
    command.signal(signal.SIGTERM, TREE)
    assert command.exit()[:2] == (1, signal.SIGTERM)
    command.release()


def test_a_released_tree_lives_and_cut_ends_it_no_more(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 0"], name="p3")
    command.exit()
    command.release()
    assert refused(guest, "MEMBERS", struct.pack("<Q", command.id)) == errno.ESRCH
    assert guest.ask("CUT", texts(["p3"])).take("I") == (1,)
    nothing_left(guest)


def test_names_and_ids_are_used_once(guest: Guest) -> None:
    command = guest.exec(["sleep", "1000"], name="p4")
    with pytest.raises(GuestError) as caught:
        guest.exec(["true"], name="p4")
    assert caught.value.args[0] == errno.EEXIST
    guest.send(N["TYPE_PING"], id=command.id)
    with pytest.raises(GuestError) as caught:
        guest.next(0, command.id)
    assert caught.value.args[0] == errno.EEXIST
    end(command)


# --- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_has_a_size_a_session_and_an_end(guest: Guest) -> None:
    command = guest.exec(["sh", "-c", "stty size; read x; stty size; echo $TERM; tty >/dev/null && exit 6"], pty=(30, 90))
    seen = b""
    while b"30 90" not in seen:
        seen += command.next_of(1) or b""
    command.ask("RESIZE", struct.pack("<HH", 11, 22))
    command.send(b"x\r")
    assert command.exit()[:2] == (0, 6)
    seen += command.output()
    assert b"11 22\r\n" in seen and b"xterm-256color" in seen
    command.release()
    plain = guest.exec(["sleep", "1000"])
    assert refused(guest, "RESIZE", struct.pack("<QHH", plain.id, 1, 1)) == errno.ENOTTY
    end(plain)


def test_releasing_a_terminal_hangs_up(guest: Guest) -> None:
    command = guest.exec(["sleep", "1000"], pty=(1, 1), name="p5")
    command.release()
    nothing_left(guest)


def test_control_c_reaches_the_foreground(guest: Guest) -> None:
    command = guest.exec(["cat"], pty=(10, 10))
    command.send(b"\x03")
    assert command.exit()[:2] == (1, signal.SIGINT)
    command.release()


# --- the machine -----------------------------------------------------------------------------------------------------


def test_identity_confirms_each_part_and_gives_fresh_bytes(guest: Guest) -> None:
    answers = []
    for _ in range(2):
        answer = guest.ask("IDENTITY", os.urandom(64) + struct.pack("<Q", 0) + text("box-7") + text("") + text(""))
        done, zero = answer.take("II")
        assert (done, zero, len(answer.data)) == (1 | 2, 0, 40)
        answers.append(answer.data[8:])
    assert answers[0] != answers[1]
    assert guest.run(["hostname"])[1] == b"box-7\n"
    assert refused(guest, "IDENTITY", bytes(72) + text("x" * 65) + text("") + text("")) == errno.EINVAL


def test_usage_adds_up(guest: Guest) -> None:
    usage: Payload = guest.ask("USAGE")
    used, _peak, total, _cpu, processes, disk_used, disk, _inodes = usage.take("8Q")
    usage.take("QQII")
    assert usage.over and 0 < used <= total and disk_used <= disk and processes == 0
    assert refused(guest, "FREEZE") == errno.EOPNOTSUPP
    guest.ask("THAW")


def network(guest: Guest, *, addresses: list[str], gateways: list[str], servers: list[str] | None = None, mac: bytes = bytes(6)) -> None:
    guest.ask("NETWORK", text("net0") + mac + struct.pack("<I", 1400) + texts(addresses) + texts(gateways) + texts(servers or []))


def test_a_device_gets_its_addresses_and_loses_those_before(guest: Guest) -> None:
    with pytest.raises(GuestError) as caught:
        network(guest, addresses=["10.0.0.2/24"], gateways=[])
    assert caught.value.args[0] == errno.ENODEV
    assert guest.run(["ip", "link", "add", "net0", "type", "veth", "peer", "name", "peer0"])[0] == 0
    assert guest.run(["ip", "link", "set", "peer0", "up"])[0] == 0
    network(guest, addresses=["10.0.0.2/24", "fd00::2/64"], gateways=["10.0.0.1", "fd00::1"], mac=b"\x02\0\0\0\0\1")
    network(guest, addresses=["10.0.1.2/24", "fd00:1::2/64"], gateways=["10.0.1.1"], mac=b"\x02\0\0\0\0\2")
    shown = guest.run(["ip", "-o", "addr", "show", "net0"])[1].decode()
    assert "10.0.1.2/24" in shown and "fd00:1::2/64" in shown
    assert "tentative" not in shown.replace("link tentative", ""), "an address of ours cannot be used at once"
    assert "10.0.0.2" not in shown and "fd00::2/" not in shown
    link = guest.run(["ip", "link", "show", "net0"])[1].decode()
    assert "02:00:00:00:00:02" in link and "mtu 1400" in link
    assert guest.run(["ip", "route", "show", "default"])[1].startswith(b"default via 10.0.1.1 dev net0")
    with pytest.raises(GuestError) as caught:
        network(guest, addresses=["10.0.0.300/24"], gateways=[])
    assert caught.value.args[0] == errno.EINVAL
