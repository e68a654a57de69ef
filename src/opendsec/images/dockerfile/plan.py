# SPDX-License-Identifier: Apache-2.0
"""Instructions to stages, and a stage to steps: pure, so that a plan can be printed, compared and tested.

A stage is planned when the config of the image it begins with is known, since its environment takes part in substitutions.

    Run       a command in a sandbox of the layers so far
    Copy      files of the context, or of another stage or image
    MakeDir   WORKDIR's directory

Each makes one layer. All other instructions change the `Config` only.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import ImageConfig
from opendsec.images.dockerfile.parse import Instruction, json_words, refuse
from opendsec.images.dockerfile.words import BadWord, Values, one_word, raw_words, split

SHELL = ("/bin/sh", "-c")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRATCH = "scratch"
_STAGE_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONLY_HEREDOC = re.compile(r"<<-?(['\"]?)\w+\1")
_REMOTE = re.compile(r"(?:https?|ftp|git|ssh)://|git@")


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    argv: tuple[str, ...]
    env: dict[str, str]
    user: str
    cwd: str


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """`origin`: "" is the context, else the name of a stage or an image. `to` is absolute; with a slash at its end it is a directory."""

    origin: str
    sources: tuple[str, ...]
    to: str
    chown: str = ""
    chmod: int | None = None
    unpack: bool = False  # ADD: archives


class MakeDir(msgspec.Struct, frozen=True, kw_only=True, tag="mkdir"):
    path: str


Action = Run | Copy | MakeDir


class Step(NamedTuple):
    line: int
    text: str  # as in the file, for people
    action: Action


class Stage(NamedTuple):
    """`base`: "scratch", the name of an earlier stage (`from_stage`), or of an image."""

    number: int
    name: str  # "" if it has none
    line: int
    base: str
    from_stage: int | None
    instructions: tuple[Instruction, ...]


class Dockerfile(NamedTuple):
    stages: tuple[Stage, ...]
    arguments: Mapping[str, str]  # those before the first FROM
    notes: tuple[str, ...]


class Planned(NamedTuple):
    steps: tuple[Step, ...]
    config: ImageConfig
    notes: tuple[str, ...]


def stages(instructions: Sequence[Instruction], given: Mapping[str, str]) -> Dockerfile:
    """Cut at each FROM. `given`: the request's build arguments. Raises InvalidRequest with the line."""
    arguments = Values()
    found: list[Stage] = []
    current: list[Instruction] = []
    head: tuple[int, str, str, int | None] | None = None

    def finish() -> None:
        if head is not None:
            line, name, base, from_stage = head
            found.append(Stage(len(found), name, line, base, from_stage, tuple(current)))
        current.clear()

    declared = set()
    for instruction in instructions:
        if instruction.name == "FROM":
            finish()
            head = _from(instruction, arguments, found)
        elif head is not None:
            current.append(instruction)
        elif instruction.name == "ARG":
            for name, default in _arguments(instruction, arguments):
                value = given.get(name, default)
                if value is not None:
                    arguments[name] = value
        else:
            instruction.refuse(f"{instruction.name} before the first FROM: only ARG may be there")
        if instruction.name == "ARG":
            declared |= {word.partition("=")[0] for word in instruction.text.split()}
    finish()
    if not found:
        refuse(instructions[-1].line, "there is no FROM")
    unused = sorted(set(given) - declared)
    return Dockerfile(tuple(found), arguments, tuple(f"the argument {name!r} is declared nowhere" for name in unused))


def _from(instruction: Instruction, arguments: Values, earlier: Sequence[Stage]) -> tuple[int, str, str, int | None]:
    words = _split(instruction, instruction.text, arguments)
    if len(words) == 3 and words[1].upper() == "AS":
        name = words[2].lower()
        if not _STAGE_NAME.fullmatch(name) or name == SCRATCH:
            instruction.refuse(f"{words[2]!r} cannot be the name of a stage")
        if any(stage.name == name for stage in earlier):
            instruction.refuse(f"there is a stage {name!r} already")
    elif len(words) == 1:
        name = ""
    else:
        instruction.refuse("must be FROM IMAGE [AS NAME]" + ("" if words else ": the name of the image is empty"))
    base = words[0]
    if not base:
        instruction.refuse("the name of the image is empty")
    return instruction.line, name, base, next((stage.number for stage in earlier if stage.name == base.lower()), None)


def target(dockerfile: Dockerfile, name: str) -> Stage:
    """The stage to build. Raises InvalidRequest."""
    if not name:
        return dockerfile.stages[-1]
    stage = find(dockerfile, name)
    if stage is None:
        known = ", ".join(stage.name for stage in dockerfile.stages if stage.name) or "none has a name"
        raise InvalidRequest(f"no stage {name[:80]!r}; stages: {known}", field="source.target")
    return stage


def find(dockerfile: Dockerfile, name: str, before: int | None = None) -> Stage | None:
    """A stage by name or number, of those before number `before`."""
    for stage in dockerfile.stages[:before]:
        if name.lower() == stage.name or name == str(stage.number):
            return stage
    return None


def plan(stage: Stage, dockerfile: Dockerfile, base: ImageConfig, given: Mapping[str, str]) -> Planned:
    """The steps of a stage that begins with an image of this config. Raises InvalidRequest with the line."""
    planner = _Planner(base, dockerfile.arguments, given)
    for instruction in stage.instructions:
        try:
            getattr(planner, f"do_{instruction.name.lower()}")(instruction)
        except BadWord as error:
            instruction.refuse(str(error))
    return Planned(tuple(planner.steps), planner.config(), tuple(planner.notes))


class _Planner:
    """One method, `do_…`, for each instruction."""

    def __init__(self, base: ImageConfig, outer: Mapping[str, str], given: Mapping[str, str]) -> None:
        self.env = dict(base.env)
        self.env.setdefault("PATH", PATH)
        self.arguments: dict[str, str] = {}
        self.outer, self.given = outer, given
        self.limit = Values()
        self.user, self.cwd = base.user, base.workdir
        self.entry, self.command, self.own_command = base.entrypoint, base.cmd, False
        self.shell: tuple[str, ...] = SHELL
        self.steps: list[Step] = []
        self.notes: list[str] = []

    def config(self) -> ImageConfig:
        return ImageConfig(env=self.env, user=self.user, workdir=self.cwd, entrypoint=self.entry, cmd=self.command)

    @property
    def values(self) -> Values:
        """What substitutions see: the environment wins over arguments."""
        return Values({**self.arguments, **self.env}, of=self.limit)

    def word(self, instruction: Instruction, text: str) -> str:
        return one_word(text, self.values, instruction.escape)

    def step(self, instruction: Instruction, action: Action) -> None:
        self.steps.append(Step(instruction.line, str(instruction), action))

    def do_run(self, instruction: Instruction) -> None:
        words = json_words(instruction.text)
        if words is None:
            text = instruction.text
            if instruction.heredocs:
                if len(instruction.heredocs) == 1 and _ONLY_HEREDOC.fullmatch(text):
                    text = instruction.heredocs[0].text
                    if text.startswith("#!"):
                        instruction.refuse("a here-document with a program of its own (#!) is not supported: name the program in RUN")
                else:
                    text = "\n".join((text, *(heredoc.raw for heredoc in instruction.heredocs)))
            words = (*self.shell, text)
        elif not words:
            instruction.refuse("the command is empty")
        env = {**self.arguments, **self.env}
        self.step(instruction, Run(argv=words, env=env, user=self.user, cwd=self.cwd))

    def do_copy(self, instruction: Instruction, *, unpack: bool = False) -> None:
        words = json_words(instruction.text)
        if words is None:
            words = tuple(split(instruction.text, self.values, instruction.escape))
        else:
            words = tuple(self.word(instruction, word) for word in words)
        if len(words) < 2 or not all(words):
            instruction.refuse(f"{instruction.name} needs at least one source and a destination")
        *sources, to = words
        if unpack and any(_REMOTE.match(source) for source in sources):
            instruction.refuse("ADD of something that is not in the context is not supported")
        flags = {name: self.word(instruction, value) for name, value in instruction.flags.items()}
        where = posixpath.normpath(posixpath.join(self.cwd, to))
        if to.endswith(("/", "/.")) or to == "." or len(sources) > 1:
            where = where.rstrip("/") + "/"
        if len(sources) > 1 and not to.endswith(("/", ".")):
            instruction.refuse("the destination of several sources must be a directory and end in '/'")
        mode = None
        if "chmod" in flags:
            if not re.fullmatch(r"0?[0-7]{3,4}", flags["chmod"]):
                instruction.refuse("--chmod takes an octal mode such as 755")
            mode = int(flags["chmod"], 8)
        self.step(
            instruction,
            Copy(
                origin=flags.get("from", ""),
                sources=tuple(sources),
                to=where,
                chown=flags.get("chown", ""),
                chmod=mode,
                unpack=unpack,
            ),
        )

    def do_add(self, instruction: Instruction) -> None:
        self.do_copy(instruction, unpack=True)

    def do_env(self, instruction: Instruction) -> None:
        values = self.values  # all of one instruction see what was before it
        words = raw_words(instruction.text, instruction.escape)
        if "=" not in words[0]:
            name, _, rest = instruction.text.partition(" ")
            if not rest.strip():
                instruction.refuse("must be ENV NAME=VALUE …")
            pairs = [(name, one_word(rest.strip(), values, instruction.escape))]
        else:
            pairs = []
            for word in words:
                name, equals, value = word.partition("=")
                if not equals:
                    instruction.refuse(f"must be ENV NAME=VALUE …; got {word[:80]!r}")
                pairs.append((one_word(name, values, instruction.escape), one_word(value, values, instruction.escape)))
        for name, value in pairs:
            if not name or "=" in name:
                instruction.refuse("the name of a variable is empty")
            self.env[name] = value

    def do_arg(self, instruction: Instruction) -> None:
        for name, default in _arguments(instruction, self.values):
            value = self.given.get(name, default if default is not None else self.outer.get(name))
            if value is not None:
                self.arguments[name] = value

    def do_workdir(self, instruction: Instruction) -> None:
        path = self.word(instruction, instruction.text)
        if not path:
            instruction.refuse("the path is empty")
        self.cwd = posixpath.normpath(posixpath.join("/", self.cwd, path))
        if self.cwd.startswith("//"):
            self.cwd = self.cwd[1:]
        if self.cwd != "/":
            self.step(instruction, MakeDir(path=self.cwd))

    def do_user(self, instruction: Instruction) -> None:
        self.user = self.word(instruction, instruction.text)
        if not self.user:
            instruction.refuse("the user is empty")

    def do_entrypoint(self, instruction: Instruction) -> None:
        self.entry = self._command(instruction)
        if not self.own_command:
            self.command = ()  # the base's arguments were for the base's entry point

    def do_cmd(self, instruction: Instruction) -> None:
        self.command, self.own_command = self._command(instruction), True

    def _command(self, instruction: Instruction) -> tuple[str, ...]:
        words = json_words(instruction.text)
        return (*self.shell, instruction.text) if words is None else words

    def do_shell(self, instruction: Instruction) -> None:
        words = json_words(instruction.text)
        if not words:
            instruction.refuse('must be SHELL ["program", "argument", …]')
        self.shell = words

    def do_label(self, instruction: Instruction) -> None:
        self.notes.append(f"line {instruction.line}: LABEL is left out: images here have no labels")


def _arguments(instruction: Instruction, values: Values) -> list[tuple[str, str | None]]:
    """The names that an ARG declares, each with its default."""
    found: list[tuple[str, str | None]] = []
    try:
        words = raw_words(instruction.text, instruction.escape)
        for word in words:
            name, equals, value = word.partition("=")
            if not _VARIABLE.fullmatch(name):
                instruction.refuse(f"{name[:80]!r} cannot be the name of an argument")
            found.append((name, one_word(value, values, instruction.escape) if equals else None))
    except BadWord as error:
        instruction.refuse(str(error))
    return found


def _split(instruction: Instruction, text: str, values: Values) -> list[str]:
    try:
        return split(text, values, instruction.escape)
    except BadWord as error:
        instruction.refuse(str(error))
