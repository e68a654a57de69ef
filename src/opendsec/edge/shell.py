# SPDX-License-Identifier: Apache-2.0
"""The shell of a session: the program it runs, and the frames it speaks. Pure.

A session is one bash process that executes each command by `eval` in itself, which is how a directory, variables, functions, options and
background jobs stay. Commands and exit statuses travel on two descriptors of their own, never in the output:

    edge → shell    "<number> <bytes> NUL" and then that many bytes of shell text
    shell → edge    "<number> <exit status> NUL" after each, and for number 0 once it is ready

So no sentinel is looked for in the output, and nothing a command prints can be taken for one. When a status has come, whatever the shell
and the children it waited for wrote before is in the pipes of the output: the edge takes that, and cuts there.

How the driver below works, and why it is not the obvious loop:

* Children must not see the two descriptors, and bash has no command to set close-on-exec. But a redirection of a group saves the
  descriptor it covers, at 10 or above, close-on-exec; and `exec N<&10` copies that flag along with the descriptor. So, inside a group
  that covers 3, the saved copy of it is copied to its place high up, and 3 is closed. The text of a command may still close or overwrite
  the high ones on purpose; then the shell cannot go on, the edge sees it end or answer nonsense, and closes the session.
* `read -N` takes the text in large pieces where `read -d ''` would take it byte by byte; it counts characters, hence LC_ALL=C for it
  alone. TMOUT would end a `read`, a trapped signal does.
* All but the `eval` is in the loop's condition, where `set -e` does not strike and `$?` is still that of the `eval` before. So a stray
  `break` or `continue` in a command, which acts on this very loop, still answers. The outer loops are for the `break`.
* The condition is a function, because DEBUG and ERR traps do not reach into one, and silent on stderr, for `set -x`. The `eval` is in no
  function: `declare` in a command would make a local variable.
* `$?` gets its old value before a command by a function that returns it; in a condition, because with `set -e` its failure would end the
  shell. The `eval` itself is in none, so `set -e` works in commands, and ends the shell, as it would end any.
* `set -a` exports every variable that is assigned, and an exported command text can be too long for any program to start.
* Killing what a command runs is not enough to end it: the shell would go on with the rest of its text. On the signal ABANDON it gives the
  text up, through functions, loops and sourced files; traps cannot unwind in one step, so the first steps out and leaves a DEBUG trap that
  skips what would come next. What the shell does by itself in C (a `read` from a pipe) it does not give up.
* It is one line, so that messages give the lines of a command's text.
"""

from __future__ import annotations

from typing import NamedTuple

ABANDON = 47  # a real-time signal in the middle of their range, which programs leave alone
HIGHEST = 1000  # where the two descriptors are, if the limit of open files allows; beyond what scripts close in loops
MAX_STATUS_BYTES = 64

# Run by the trap of ABANDON: in a function leave it, else leave all loops, the driver's included; what comes next meets _SKIP.
_ABANDON = (
    "case ${{FUNCNAME-}} in __opendsec_*) ;; "
    '"") builtin shopt -s extdebug; __opendsec_pass=1; builtin trap "$__opendsec_skip" DEBUG; builtin continue 1000;; '
    '*) builtin shopt -s extdebug; __opendsec_pass=1; builtin trap "$__opendsec_skip" DEBUG; builtin return 143;; esac'
)
# Run before each command from then on, the last one of _ABANDON first (BASH_COMMAND does not tell that one: in a trap it names the command
# that was interrupted), until the driver is reached. With extdebug a failure here skips the command.
_SKIP = (
    "if [[ $__opendsec_pass ]]; then __opendsec_pass=; "
    "elif [[ $BASH_COMMAND == __opendsec_* ]]; then builtin trap - DEBUG; builtin shopt -u extdebug; "
    "elif [[ ${{FUNCNAME-}} ]]; then builtin return 143; "
    "else builtin false; fi"
)
_OUTER_LOOPS = 3  # so many levels of a stray `break` do no harm
_DRIVER = (
    "{{ exec {commands}<&10; }} 3<&-; {{ exec {status}>&10; }} 4>&-; exec 3<&- 4>&-; "
    "unset -v BASH_EXECUTION_STRING; shopt -s expand_aliases execfail; "
    f"__opendsec_skip='{_SKIP}'; trap '{_ABANDON}' {{abandon}}; "
    '__opendsec_status() {{ builtin return "$1"; }}; '
    "__opendsec_again() {{ builtin return 0; }}; "
    "__opendsec_next() {{ "
    "__opendsec_last=$?; "
    "case $- in *x*) builtin set +x; __opendsec_trace=$'builtin set -x\\n';; *) __opendsec_trace=;; esac; "
    'builtin printf \'%s %s\\0\' "$__opendsec_number" "$__opendsec_last" >&{status}; '
    "until TMOUT= LC_ALL=C IFS=' ' builtin read -r -d '' -u {commands} __opendsec_number __opendsec_size; "
    "do [[ $? -gt 128 ]] || builtin exit 0; done; "
    'until TMOUT= LC_ALL=C IFS= builtin read -r -N "$__opendsec_size" -u {commands} __opendsec_text; '
    "do [[ $? -gt 128 ]] || builtin exit 0; done; "
    "builtin export -n __opendsec_last __opendsec_trace __opendsec_number __opendsec_size __opendsec_text; "
    "}}; __opendsec_number=0; "
    + "while {{ __opendsec_again; }} 2>/dev/null; do "
    * _OUTER_LOOPS
    + "while {{ __opendsec_next; }} 2>/dev/null; do "
    'if __opendsec_status "$__opendsec_last"; '
    'then builtin eval "$__opendsec_trace$__opendsec_text"; '
    'else builtin eval "$__opendsec_trace$__opendsec_text"; fi; '
    "done" + "; done" * _OUTER_LOOPS
)


def argv(open_files: int) -> tuple[str, ...]:
    """The command line of the shell, which is given the channels as descriptors 3 (commands) and 4 (status)."""
    top = min(open_files, HIGHEST)
    return "bash", "--norc", "--noprofile", "-c", _DRIVER.format(commands=top - 2, status=top - 1, abandon=ABANDON), "bash"


def command_frame(number: int, text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return b"%d %d\0" % (number, len(data)) + data


class Status(NamedTuple):
    number: int
    code: int  # 0 to 255


class StatusReader:
    """Takes what comes from a shell apart. All of it is hostile: the text of a command can write to that channel."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Status]:
        """The statuses completed by `data`. Raises ValueError for anything else than statuses."""
        *complete, self._rest = (self._rest + data).split(b"\0")
        if len(self._rest) > MAX_STATUS_BYTES:
            raise ValueError("a status without an end")
        return [_parse(frame) for frame in complete]


def _parse(frame: bytes) -> Status:
    number, _, code = frame.partition(b" ")
    if not (number.isdigit() and code.isdigit() and len(frame) <= MAX_STATUS_BYTES and int(code) <= 255):
        raise ValueError(f"not a status: {frame[:MAX_STATUS_BYTES]!r}")
    return Status(int(number), int(code))
