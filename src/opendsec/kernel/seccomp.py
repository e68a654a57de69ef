# SPDX-License-Identifier: Apache-2.0
"""A small assembler: a list of rules becomes a seccomp filter in classic BPF.

Shape of a program. The architecture is checked once. Then a binary search over ranges of system call numbers, in which
all numbers with the same answer are one range, so that a filter of some 300 names takes about 8 comparisons a call and
fits in a few hundred instructions. Answers that hang on arguments are chains of comparisons after the tree.

Facts that shape it:

* Calls that are allowed whatever their arguments cost nothing: the kernel runs the filter once a number at load time and
  remembers "always allowed" in a bitmap. That works only while the path to the answer reads nothing but the number and the
  architecture, so arguments are loaded in the chains alone.
* Arguments are 64 bits wide and BPF registers 32, so each comparison is two. Where the kernel itself takes an `int`, it
  ignores the upper half, and a filter that compares all 64 bits is bypassed by setting it (that has happened, to TIOCSTI
  filters): use `ArgCheck.u32` for those.
* Pointers cannot be followed. clone3 hides its flags behind one, so a profile that cares about clone's flags answers
  ENOSYS to clone3, and glibc falls back to clone.
* On x86_64, calls with the x32 bit set reach the same kernel functions under other numbers. They get ENOSYS, as from a
  kernel without x32; the same holds for the number -1, which is what the kernel gives too.
* Jump offsets of conditional jumps are 8 bits; a jump that comes out too far is split in two ("relaxed").
"""

from __future__ import annotations

import errno
import struct

from opendsec.kernel import abi, syscall_table, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALLOW = abi.SECCOMP_RET_ALLOW
KILL_PROCESS = abi.SECCOMP_RET_KILL_PROCESS
LOG = abi.SECCOMP_RET_LOG
TRAP = abi.SECCOMP_RET_TRAP
NOTIFY = abi.SECCOMP_RET_USER_NOTIF

ARCHES: dict[str, int] = {"x86_64": abi.AUDIT_ARCH_X86_64, "aarch64": abi.AUDIT_ARCH_AARCH64}

MAX_INSTRUCTIONS = 4096
"""BPF_MAXINSNS: the kernel takes no longer program."""

_FULL = 0xFFFF_FFFF_FFFF_FFFF
_HALF = 0xFFFF_FFFF
_OPS = ("==", "!=", "<", "<=", ">", ">=")

# BPF opcodes.
_LD_ABS, _AND = 0x20, 0x54
_JA, _JEQ, _JGT, _JGE, _RET = 0x05, 0x15, 0x25, 0x35, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16


def errno_action(code: int) -> int:
    """The action "fail with this errno, do not make the call"."""
    if not 0 <= code < 4096:
        raise ValueError(f"errno out of range: {code}")
    return abi.SECCOMP_RET_ERRNO | code


ENOSYS = errno_action(errno.ENOSYS)
EPERM = errno_action(errno.EPERM)


class ArgCheck:
    """A condition on one argument: `(argument & mask) <op> value`, unsigned."""

    __slots__ = ("index", "mask", "op", "value")

    def __init__(self, index: int, op: str, value: int, mask: int = _FULL) -> None:
        if not 0 <= index <= 5:
            raise ValueError(f"argument index out of range: {index}")
        if op not in _OPS:
            raise ValueError(f"unknown comparison: {op!r}")
        if not (0 <= value <= _FULL and 0 <= mask <= _FULL):
            raise ValueError("values and masks are unsigned 64-bit numbers")
        self.index, self.op, self.value, self.mask = index, op, value, mask

    @classmethod
    def u32(cls, index: int, op: str, value: int, mask: int = _HALF) -> ArgCheck:
        """For arguments that the kernel takes as 32 bits (ioctl's request, socket's family): the upper half is ignored."""
        return cls(index, op, value, mask & _HALF)

    def _key(self) -> tuple[int, str, int, int]:
        return (self.index, self.op, self.value, self.mask)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArgCheck) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        mask = "" if self.mask == _FULL else f" & {self.mask:#x}"
        return f"ArgCheck(arg{self.index}{mask} {self.op} {self.value:#x})"


class Rule:
    """`action` for the calls in `names` when all of `args` hold. The first rule that matches a call decides.

    A name that some supported machine has but not this one is skipped; a name none has raises ValueError.
    """

    __slots__ = ("action", "args", "names")

    def __init__(self, action: int, names: Iterable[str], args: Iterable[ArgCheck] = ()) -> None:
        self.action = action
        self.names = tuple(names)
        self.args = tuple(args)
        unknown = [name for name in self.names if name not in syscall_table.ALL_NAMES]
        if unknown:
            raise ValueError(f"unknown system calls: {', '.join(unknown)}")

    def __repr__(self) -> str:
        return f"Rule({self.action:#x}, {list(self.names)}, {list(self.args)})"


# A call's answer: rules in order, each (checks, action); the last has no checks.
_Chain = tuple[tuple[tuple[ArgCheck, ...], int], ...]


def _chains(rules: Sequence[Rule], default: int, table: dict[str, int]) -> dict[int, _Chain]:
    chains: dict[int, list[tuple[tuple[ArgCheck, ...], int]]] = {}
    decided: set[int] = set()
    for rule in rules:
        for name in rule.names:
            number = table.get(name)
            if number is None or number in decided:
                continue
            chains.setdefault(number, []).append((rule.args, rule.action))
            if not rule.args:
                decided.add(number)
    return {number: tuple(chain) if number in decided else (*chain, ((), default)) for number, chain in chains.items()}


def _ranges(chains: dict[int, _Chain], default: int, beyond: int, last: int, arch: str) -> list[tuple[int, _Chain]]:
    """The number line as (first number, answer) with neighbours that answer alike joined."""
    marks: dict[int, _Chain] = {0: (((), default),), last + 1: (((), beyond),)}
    for number, chain in chains.items():
        marks[number] = chain
        if number + 1 not in chains and number < last:
            marks[number + 1] = (((), default),)
    if arch == "x86_64":
        marks[abi.X32_SYSCALL_BIT] = (((), ENOSYS),)
    ranges: list[tuple[int, _Chain]] = []
    for number in sorted(marks):
        if not ranges or ranges[-1][1] != marks[number]:
            ranges.append((number, marks[number]))
    return ranges


class _Assembler:
    """Instructions with symbolic jump targets. Jumps go forward only, as BPF demands."""

    def __init__(self) -> None:
        self.code: list[tuple[int, int, int, int]] = []  # (opcode, k, true label, false label); labels unused: -1
        self.labels: list[int] = []  # label → index of the instruction it precedes

    def label(self) -> int:
        self.labels.append(-1)
        return len(self.labels) - 1

    def place(self, label: int) -> None:
        self.labels[label] = len(self.code)

    def emit(self, opcode: int, k: int) -> None:
        self.code.append((opcode, k, -1, -1))

    def branch(self, opcode: int, k: int, true: int, false: int) -> None:
        self.code.append((opcode, k, true, false))

    def assemble(self) -> bytes:
        # Sizes only grow from pass to pass, so this ends.
        long_true = [False] * len(self.code)
        long_false = [False] * len(self.code)
        while True:
            starts, at = [], 0
            for index, (_, _, true, _) in enumerate(self.code):
                starts.append(at)
                at += 1 + (true >= 0) * (long_true[index] + long_false[index])
            starts.append(at)
            changed = False
            for index, (_, _, true, false) in enumerate(self.code):
                if true < 0:
                    continue
                for target, far in ((true, long_true), (false, long_false)):
                    if not far[index] and starts[self.labels[target]] - starts[index] - 1 > 255:
                        far[index] = changed = True
            if not changed:
                break
        if at > MAX_INSTRUCTIONS:
            raise ValueError(f"the filter has {at} instructions, the kernel takes {MAX_INSTRUCTIONS}")
        out = bytearray()
        for index, (opcode, k, true, false) in enumerate(self.code):
            if true < 0:
                out += struct.pack("=HBBI", opcode, 0, 0, k)
                continue
            here = starts[index]
            trampolines: list[tuple[int, int]] = []
            offsets: list[int] = []
            for target, far in ((true, long_true), (false, long_false)):
                destination = starts[self.labels[target]]
                if far[index]:
                    offsets.append(len(trampolines))
                    trampolines.append((here + 1 + len(trampolines), destination))
                else:
                    offsets.append(destination - here - 1)
            out += struct.pack("=HBBI", opcode, offsets[0], offsets[1], k)
            for position, destination in trampolines:
                out += struct.pack("=HBBI", _JA, 0, 0, destination - position - 1)
        return bytes(out)


def _compare(asm: _Assembler, check: ArgCheck, true: int, false: int) -> None:
    """Jump to `true` or `false` by one argument."""
    op, value = check.op, check.value
    if op in ("<", "<=", "!="):
        op = {"<": ">=", "<=": ">", "!=": "=="}[op]
        true, false = false, true
    low_offset = _OFFSET_ARGS + 8 * check.index  # both machines are little-endian
    low = asm.label()
    for half, offset, label in ((32, low_offset + 4, low), (0, low_offset, -1)):
        mask, want = check.mask >> half & _HALF, value >> half & _HALF
        if half and mask == 0 and want == 0:
            asm.place(low)  # the upper half plays no part: 0 == 0
            continue
        asm.emit(_LD_ABS, offset)
        if mask != _HALF:
            asm.emit(_AND, mask)
        if half:
            if op != "==":
                equal = asm.label()
                asm.branch(_JGT, want, true, equal)
                asm.place(equal)
            asm.branch(_JEQ, want, label, false)
            asm.place(label)
        else:
            asm.branch({"==": _JEQ, ">": _JGT, ">=": _JGE}[op], want, true, false)


def compile_filter(
    rules: Sequence[Rule],
    default: int,
    arch: str = abi.MACHINE,
    *,
    beyond: int | None = None,
    bad_arch: int = KILL_PROCESS,
) -> bytes:
    """The program for `rules` as an array of `struct sock_filter`.

    `default` answers what no rule decides; `beyond` (left out: as `default`) answers numbers above every call in our
    tables, where ENOSYS lets a program fall back as it would on an older kernel; `bad_arch` answers calls made under
    another architecture, such as 32-bit ones. Raises ValueError for an unknown machine or too long a program.
    """
    if arch not in ARCHES:
        raise ValueError(f"unknown machine: {arch!r}")
    table = syscall_table.BY_ARCH[arch]
    beyond = default if beyond is None else beyond
    ranges = _ranges(_chains(rules, default, table), default, beyond, max(table.values()), arch)

    asm = _Assembler()
    chain_labels: dict[_Chain, int] = {}
    return_labels: dict[int, int] = {}

    def returning(action: int) -> int:
        if action not in return_labels:
            return_labels[action] = asm.label()
        return return_labels[action]

    def answer(chain: _Chain) -> int:
        if not chain[0][0]:
            return returning(chain[0][1])
        if chain not in chain_labels:
            chain_labels[chain] = asm.label()
        return chain_labels[chain]

    def search(first: int, last: int, entry: int) -> None:
        """Find the number among ranges[first:last]; `entry` is the label of this part of the tree."""
        asm.place(entry)
        middle = (first + last) // 2
        below = asm.label() if middle - first > 1 else answer(ranges[first][1])
        above = asm.label() if last - middle > 1 else answer(ranges[middle][1])
        asm.branch(_JGE, ranges[middle][0], above, below)
        if middle - first > 1:
            search(first, middle, below)
        if last - middle > 1:
            search(middle, last, above)

    start, tree = asm.label(), asm.label()
    asm.emit(_LD_ABS, _OFFSET_ARCH)
    asm.branch(_JEQ, ARCHES[arch], start, returning(bad_arch))
    asm.place(start)
    asm.emit(_LD_ABS, _OFFSET_NR)
    if len(ranges) > 1:
        search(0, len(ranges), tree)
    else:  # one answer to everything
        only = answer(ranges[0][1])
        asm.branch(_JGE, 0, only, only)

    for chain, label in chain_labels.items():
        asm.place(label)
        for checks, action in chain:
            following = asm.label()
            for position, check in enumerate(checks):
                passed = asm.label() if position < len(checks) - 1 else returning(action)
                _compare(asm, check, passed, following)
                if position < len(checks) - 1:
                    asm.place(passed)
            asm.place(following)
        # The last entry has no checks: its action is the chain's fall-through.
        asm.emit(_RET, chain[-1][1])
    for action, label in return_labels.items():
        asm.place(label)
        asm.emit(_RET, action)
    return asm.assemble()


def install(program: bytes, flags: int = 0) -> int:
    """Load a filter on this thread. Needs no_new_privs (prctl) or CAP_SYS_ADMIN in this user namespace.

    Returns the notification descriptor when `flags` has SECCOMP_FILTER_FLAG_NEW_LISTENER, else 0.
    """
    return syscalls.seccomp(abi.SECCOMP_SET_MODE_FILTER, flags, program)
