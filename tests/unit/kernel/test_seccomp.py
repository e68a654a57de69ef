# SPDX-License-Identifier: Apache-2.0
"""The assembler against an independent interpreter: whatever the rules, the program answers as reading them in order does."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import abi, seccomp
from opendsec.kernel.seccomp import ALLOW, ENOSYS, EPERM, ArgCheck, Rule, compile_filter, errno_action
from opendsec.kernel.syscall_table import BY_ARCH
from tests.unit.kernel.bpf import KILL_PROCESS, check, run, simulate

FULL = 0xFFFF_FFFF_FFFF_FFFF
ARCHES = list(BY_ARCH)


def expected(rules: list[Rule], default: int, arch: str, nr: int, args: list[int]) -> int:
    """The meaning of rules, in the plainest words."""
    if arch == "x86_64" and nr >= 0x4000_0000:  # x32, and what is negative as an int
        return ENOSYS
    compare = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    for rule in rules:
        if nr in [BY_ARCH[arch].get(name) for name in rule.names] and all(
            compare[c.op](args[c.index] & c.mask, c.value) for c in rule.args
        ):
            return rule.action
    return default


# Values around the seams: halves, signs, and what fits an int.
words = st.sampled_from([0, 1, 2, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 32, (1 << 32) + 1, 1 << 63, FULL]) | st.integers(0, FULL)
checks = st.builds(ArgCheck, st.integers(0, 5), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), words, words)
some_names = st.lists(st.sampled_from(sorted(BY_ARCH["x86_64"])), min_size=1, max_size=30)
actions = st.sampled_from([ALLOW, EPERM, ENOSYS, KILL_PROCESS, seccomp.NOTIFY, errno_action(99)])
rule_lists = st.lists(st.builds(Rule, actions, some_names, st.lists(checks, max_size=3)), max_size=12)


@given(rules=rule_lists, default=actions, arch=st.sampled_from(ARCHES), data=st.data())
def test_answers_as_the_rules_say(rules: list[Rule], default: int, arch: str, data: st.DataObject) -> None:
    program = compile_filter(rules, default, arch)
    check(program)
    named = sorted({BY_ARCH[arch][name] for rule in rules for name in rule.names if name in BY_ARCH[arch]})
    numbers = st.integers(0, 600) | st.sampled_from([0x4000_0000, 0x4000_0001, 0x8000_0000, 0xFFFF_FFFF])
    if named:
        numbers |= st.sampled_from(named) | st.sampled_from([n + 1 for n in named])
    # Arguments that hit the rules' own values more often than chance would.
    values = [c.value for rule in rules for c in rule.args]
    arguments = words | st.sampled_from(values) if values else words
    for _ in range(8):
        nr = data.draw(numbers)
        args = data.draw(st.lists(arguments, min_size=6, max_size=6))
        assert simulate(program, nr, args, arch) == expected(rules, default, arch, nr, args), (nr, args)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_call_answered_by_itself(arch: str) -> None:
    """The longest program there can be for whole calls: no two neighbours alike."""
    table = BY_ARCH[arch]
    rules = [Rule(errno_action(number % 4000 + 1), [name]) for name, number in table.items()]
    program = compile_filter(rules, ALLOW, arch)
    check(program)
    for number in table.values():
        answer, steps, _ = run(program, number, arch=arch)
        assert answer == errno_action(number % 4000 + 1)
        assert steps <= 3 + 2 * 10  # two instructions a level where a jump is far
    assert simulate(program, max(table.values()) + 1, arch=arch) == ALLOW


def test_jumps_beyond_255_instructions() -> None:
    """Many chains of comparisons lie between the tree and the last answers."""
    names = sorted(BY_ARCH["x86_64"])[:120]
    rules = [
        Rule(errno_action(index + 1), [name], [ArgCheck(part, ">", index * 7919 << 20) for part in range(4)])
        for index, name in enumerate(names)
    ]
    program = compile_filter(rules, EPERM, "x86_64")
    check(program)
    assert len(program) // 8 > 1000
    for index, name in enumerate(names):
        number = BY_ARCH["x86_64"][name]
        assert simulate(program, number, [(index * 7919 << 20) + 1] * 6) == errno_action(index + 1)
        assert simulate(program, number, [index * 7919 << 20] * 6) == EPERM


def test_other_architectures_and_x32() -> None:
    program = compile_filter([Rule(EPERM, ["mount"])], ALLOW, "x86_64")
    assert simulate(program, 165, arch="x86_64") == EPERM
    assert simulate(program, 165, arch="i386") == KILL_PROCESS
    assert simulate(program, 165, arch="aarch64") == KILL_PROCESS
    assert simulate(program, 165 | abi.X32_SYSCALL_BIT) == ENOSYS
    assert simulate(program, 0xFFFF_FFFF) == ENOSYS
    assert simulate(compile_filter([], ALLOW, "x86_64", bad_arch=ENOSYS), 0, arch="i386") == ENOSYS
    arm = compile_filter([], ALLOW, "aarch64")
    assert simulate(arm, 0x4000_0000, arch="aarch64") == ALLOW


def test_calls_newer_than_the_tables() -> None:
    program = compile_filter([Rule(ALLOW, ["read", "write"])], EPERM, "x86_64", beyond=ENOSYS)
    last = max(BY_ARCH["x86_64"].values())
    assert simulate(program, 0) == ALLOW
    assert simulate(program, last) == EPERM
    assert simulate(program, last + 1) == simulate(program, 2000) == ENOSYS
    assert simulate(program, 400) == EPERM  # a gap inside the table is no newer call


def test_clone3_refused_as_unknown() -> None:
    program = compile_filter([Rule(ENOSYS, ["clone3"])], ALLOW, "x86_64")
    assert simulate(program, 435) == ENOSYS == abi.SECCOMP_RET_ERRNO | errno.ENOSYS
    assert simulate(program, 434) == simulate(program, 436) == ALLOW


def test_upper_half_of_an_int_argument_is_ignored() -> None:
    """The kernel cuts ioctl's request to 32 bits; a filter that does not is bypassed."""
    tiocsti = 0x5412
    program = compile_filter([Rule(EPERM, ["ioctl"], [ArgCheck.u32(1, "==", tiocsti)])], ALLOW, "x86_64")
    for high in (0, 1, 0x8000_0000, 0xFFFF_FFFF):
        assert simulate(program, 16, [0, tiocsti | high << 32]) == EPERM
    assert simulate(program, 16, [0, tiocsti + 1]) == ALLOW


def test_ioctl_family_by_mask() -> None:
    family = ArgCheck.u32(1, "==", ord("X") << 8, 0xFF00)
    program = compile_filter([Rule(EPERM, ["ioctl"], [family])], ALLOW, "x86_64")
    assert simulate(program, 16, [3, 0x4004_5879]) == EPERM
    assert simulate(program, 16, [3, 0x4004_5979]) == ALLOW


def test_first_matching_rule_decides() -> None:
    rules = [
        Rule(errno_action(1), ["socket"], [ArgCheck.u32(0, "==", 16)]),
        Rule(errno_action(2), ["socket"], [ArgCheck.u32(0, ">=", 16)]),
        Rule(errno_action(3), ["socket"]),
        Rule(errno_action(4), ["socket"]),
    ]
    program = compile_filter(rules, ALLOW, "x86_64")
    assert [simulate(program, 41, [family]) for family in (16, 17, 2)] == [errno_action(1), errno_action(2), errno_action(3)]


def test_allowed_calls_read_no_arguments_and_are_found_fast() -> None:
    """Only then the kernel's bitmap of always-allowed calls serves them."""
    denied = ["mount", "umount2", "bpf", "keyctl", "ptrace", "reboot", "swapon", "io_uring_setup", "userfaultfd"]
    rules = [Rule(EPERM, denied), Rule(EPERM, ["ioctl"], [ArgCheck.u32(1, "==", 0x5412)])]
    program = compile_filter(rules, ALLOW, "x86_64")
    assert len(program) // 8 < 60
    for name, number in BY_ARCH["x86_64"].items():
        if name not in (*denied, "ioctl"):
            answer, steps, read_argument = run(program, number)
            assert (answer, read_argument) == (ALLOW, False)
            assert steps <= 12


def test_same_chain_is_emitted_once() -> None:
    both = [ArgCheck(0, "==", 5), ArgCheck(1, "==", 6)]
    one = compile_filter([Rule(EPERM, ["mount"], both)], ALLOW, "x86_64")
    two = compile_filter([Rule(EPERM, ["mount", "ioctl"], both)], ALLOW, "x86_64")
    assert len(two) - len(one) <= 3 * 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Rule(EPERM, ["no_such_call"]),
        lambda: ArgCheck(6, "==", 0),
        lambda: ArgCheck(-1, "==", 0),
        lambda: ArgCheck(0, "=", 0),
        lambda: ArgCheck(0, "==", -1),
        lambda: ArgCheck(0, "==", 1 << 64),
        lambda: ArgCheck(0, "==", 0, 1 << 64),
        lambda: errno_action(-1),
        lambda: errno_action(4096),
        lambda: compile_filter([], ALLOW, "riscv64"),
        lambda: compile_filter([Rule(i + 1, ["read"], [ArgCheck(a, ">", i) for a in range(6)]) for i in range(400)], ALLOW, "x86_64"),
    ],
)
def test_mistakes_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError):
        wrong()


def test_names_of_other_machines_are_skipped() -> None:
    program = compile_filter([Rule(EPERM, ["open", "openat"])], ALLOW, "aarch64")
    assert simulate(program, BY_ARCH["aarch64"]["openat"], arch="aarch64") == EPERM
