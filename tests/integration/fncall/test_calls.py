# SPDX-License-Identifier: Apache-2.0
"""What calls are and give: program texts, functions, programs; input and output; files; as plain Python does it."""

# ruff: noqa: E501  (programs, line by line)
from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.fncall.interface import File
from tests.fnmembers import MIB, Calls, FnNode
from tests.support import SRC


def test_a_program_text(member: Calls) -> None:
    ended = member.python("import sys\nprint('out', input())\nprint('err', file=sys.stderr)\nsys.exit(7)\n", stdin=b"line\n")
    assert (ended.code, ended.signal, ended.stdout, ended.stderr) == (7, None, b"out line\n", b"err\n")
    assert (ended.stdout_total, ended.stderr_total, ended.not_started, ended.spoiled) == (9, 4, "", "")
    assert 0 < ended.cpu_ms < 2000 and ended.wall_ms > 0 and ended.peak_memory_bytes > 0


# Programs whose whole behaviour (output, errors, exit code) must be that of `python3 main.py`.
LIKE_PYTHON = {
    "an uncaught exception": "def f():\n    return 1 / 0\n\nprint('before')\nf()\n",
    "a chain of exceptions": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e\n",
    "a syntax error": "print('a'\nx = = 1\n",
    "an exit with a text": "import sys\nprint('a')\nsys.exit('the end')\n",
    "an exit with a large code": "raise SystemExit(300)\n",
    "an exit with None": "raise SystemExit\n",
    "os._exit": "import os\nprint('lost')\nos._exit(3)\n",
    "atexit": "import atexit\natexit.register(print, 'at the end')\nprint('first')\n",
    "a thread that goes on": "import threading, time\nthreading.Thread(target=lambda: print('thread')).start()\n",
    "main": "if __name__ == '__main__':\n    print(__name__, __file__, __builtins__.__name__, __doc__)\n",
    "a file nobody closed": "f = open('x', 'w')\nf.write('text')\nimport atexit\natexit.register(lambda: None)\n",
    "an object that dies at the end": "class A:\n    def __del__(self):\n        print('gone')\na = A()\n",
    "no input": "try:\n    input()\nexcept EOFError:\n    print('no input')\n",
    "an excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1/0\n",
    "closed output": "import sys\nprint('a')\nsys.stdout.flush()\nsys.stdout.close()\n",
    "argv and path": "import sys\nprint(sys.argv, len(sys.path[0]) > 0, sys.flags.isolated)\n",
    "the module itself": "import sys\nprint(sys.modules['__main__'].__dict__ is globals(), sorted(k for k in globals() if '__' not in k))\n",
    "future": "from __future__ import annotations\ndef f(x: nothing): pass\nprint(f.__annotations__)\n",
    "no future": "def f(x: int): pass\nprint(f.__annotations__)\n",
    "non-ascii": "print('grüße', '日本')\n",
    "subprocess": "import subprocess\nprint(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)\n",
    "os.system": "import os, sys\nprint('1', flush=True)\nprint(os.system('exit 3') >> 8)\n",
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    os._exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
    "multiprocessing": (
        "import multiprocessing as m\ndef f(x):\n    return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('fork').Pool(2) as p:\n        print(p.map(f, range(5)))\n"
    ),
    "executor": "from concurrent.futures import ThreadPoolExecutor as T\nwith T(3) as t:\n    print(list(t.map(abs, [-1, -2])))\n",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print('async')\nasyncio.run(main())\n",
    "recursion": "def f():\n    f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')\n",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))\n",
    "pickle": "import pickle\nclass A:\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)\n",
    "handlers": "import signal\nprint(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGTERM) == 0)\n",
    "raise_signal": "import signal\nsignal.raise_signal(signal.SIGTERM)\n",
    "abort": "import os\nos.abort()\n",
    "keyboard interrupt": "raise KeyboardInterrupt\n",
    "its own source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))\n",
    "a file in a cycle": "import gc\ngc.disable()\nclass A: pass\na = A()\na.a = a\na.f = open('x', 'w')\na.f.write('text')\n",
    "an old file in a cycle": "import gc\nclass A: pass\na = A()\na.a = a\na.f = open('x', 'w')\na.f.write('text')\ngc.collect()\n",
    "another stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb', closefd=False))\nprint('a', end='')\n",
    "modules replaced": "import sys\nsys.modules.pop('json', None)\nimport threading\nthreading.Thread(target=lambda: print('t')).start()\n",
    "umask": "import os\nprint(oct(os.umask(0)))\n",
    "a byte order mark": "\ufeffprint(1)\n1 / 0\n",
    "no end of the last line": "print(undefined)",
    "lines of the source": "x = '\\x0c\u2028\\x85'\r\nprint(ascii(x))\r\n1 / 0\r\n",
    "what is in globals": "print(sorted(globals()), __annotations__, __cached__)\n",
    "orig_argv": "import sys\nprint(sys.orig_argv)\n",
    "output that cannot be written": "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('x')\n",
    "output that cannot be written, and an exit code": "import os\nprint('x')\nos.close(1)\nraise SystemExit(3)\n",
    "closed standard error": "import os\nos.close(2)\n1 / 0\n",
    "no sys.stderr": "import sys\nsys.stderr = None\n1 / 0\n",
    "no sys.stdout": "import sys\ndel sys.stdout\nprint(1)\n",
    "an excepthook that fails": "import sys\ndef hook(*a):\n    {}['a']\nsys.excepthook = hook\n1 / 0\n",
    "an excepthook that is none": "import sys\nsys.excepthook = 3\n1 / 0\n",
}


@pytest.mark.parametrize("source", LIKE_PYTHON.values(), ids=LIKE_PYTHON.keys())
def test_a_program_text_runs_as_python_runs_it(member: Calls, source: str) -> None:
    """Beside the image's own interpreter, started as anybody would, in a call of the other kind."""
    warm = member.python(source, outputs=["x"])
    plain = member.exec("python3", "main.py", files={"main.py": source.encode()}, outputs=["x"])
    assert (warm.code, warm.signal, warm.stdout, warm.files) == (plain.code, plain.signal, plain.stdout, plain.files)
    assert warm.stderr == plain.stderr


@pytest.mark.parametrize("limit", [1000, 60])
def test_functions_call_each_other_as_deep_as_in_python(member: Calls, limit: int) -> None:
    source = f"import sys\nsys.setrecursionlimit({limit})\ndef f(n):\n    return n and 1 + f(n - 1)\nprint(f({limit - 2}), sys.getrecursionlimit())\nf({limit - 1})\n"
    warm, plain = member.python(source), member.exec("python3", "main.py", files={"main.py": source.encode()})
    assert (warm.code, warm.stdout, warm.stderr) == (plain.code, plain.stdout, plain.stderr)


# What a pipe or a call can be like when it ends before anybody has looked: all of its output comes back, and counts.
QUICK = {
    "more than a pipe has": ("import os\nos.write(1, b'x' * 300_000)", b"x" * 300_000),
    "a full pipe": (
        "import os\nos.set_blocking(1, False)\nwhile True:\n    try: os.write(1, b'x' * 4096)\n    except BlockingIOError: os._exit(0)",
        b"x" * 65_536,
    ),
    "a small pipe": ("import fcntl, os\nfcntl.fcntl(1, 1031, 4096)\nos.write(1, b'x' * 9000)", b"x" * 9000),
    "a large pipe": ("import fcntl, os\nfcntl.fcntl(1, 1031, 1 << 20)\nos.write(1, b'x' * (1 << 20))\nos._exit(0)", b"x" * (1 << 20)),
    "packets": ("import os, fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)\n[os.write(1, b'xy') for _ in range(10)]", b"xy" * 10),
    "what it would take back": (
        "import os\nos.write(1, b'abc')\ntry:\n    os.read(os.open('/proc/self/fd/1', os.O_RDONLY), 1)\nexcept PermissionError:\n    os._exit(0)",
        b"abc",
    ),
    "closed at once": ("import os\nos.write(2, b'')\nos.closerange(0, 3)\nos._exit(0)", b""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "told"), QUICK.values(), ids=QUICK.keys())
def test_output_of_a_call_that_ends_at_once(member: Calls, source: str, told: bytes) -> None:
    ended = member.python(source, output_bytes=2 * MIB)
    assert (ended.code, ended.stdout == told, ended.stdout_total, ended.stderr) == (0, True, len(told), b"")
    if told and "O_DIRECT" not in source:  # of packets, what is not read of one is gone
        ended = member.python(source, output_bytes=len(told) - 1)
        assert ended.output_exceeded and ended.stdout == told[:-1] and not ended.spoiled
    member.check()


@pytest.fixture(scope="module")
def by_python(fn_node: FnNode) -> Iterator[Calls]:
    """A member whose interpreter lacks what the way by its C interface (native/source.h) asks for."""
    with fn_node.member(warmup="import sys\nsys.__stderr__ = None\n") as calls:
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize("source", LIKE_PYTHON.values(), ids=LIKE_PYTHON.keys())
def test_a_program_text_runs_likewise_without_the_c_interface(member: Calls, by_python: Calls, source: str) -> None:
    one, other = member.python(source, outputs=["x"]), by_python.python(source, outputs=["x"])
    assert (one.code, one.signal, one.stdout, one.stderr, one.files) == (other.code, other.signal, other.stdout, other.stderr, other.files)


def test_functions(member: Calls) -> None:
    assert member.function("math:hypot", 3, 4).value == b"5.0"
    assert (
        json.loads(member.function("json:dumps", {"a": [1, None]}, kwargs={"indent": 1}).value or b"") == '{\n "a": [\n  1,\n  null\n ]\n}'
    )
    assert member.function("os.path:join", "a", "b").value == b'"a/b"'
    text = b"def f(x, *, y=1):\n    print('said')\n    return {'x': x, 'y': y}\nclass C:\n    g = lambda: 5\n"
    mine = {"mine.py": text}
    ended = member.function("mine:f", "é", kwargs={"y": [2]}, files=mine)
    assert (ended.code, ended.value, ended.stdout) == (0, b'{"x": "\\u00e9", "y": [2]}', b"said\n")
    assert member.function("mine:C.g", files=mine).value == b"5"


def test_functions_that_are_not_there(member: Calls) -> None:
    for name, text in (
        ("nothing:f", "there is no module 'nothing'"),
        ("os.nothing:f", "there is no module 'os.nothing'"),
        ("math:nothing", "module 'math' has no 'nothing'"),
        ("math:pi", "'pi' of module 'math' cannot be called"),
    ):
        ended = member.function(name)
        assert (ended.code, ended.value, ended.not_started, ended.caller_fault) == (None, None, text, True)


def test_functions_that_fail(member: Calls) -> None:
    ended = member.function("math:sqrt", -1)
    assert (ended.code, ended.value, ended.not_started) == (1, None, "")
    assert ended.stderr == b"ValueError: math domain error\n"
    assert b"not JSON serializable" in member.function("builtins:object").stderr
    assert member.function("math:log", 0, kwargs={"x": 1}).code == 1
    assert member.function("sys:exit", 9).code == 9
    nan = member.function("builtins:float", "nan")
    assert nan.code == 1 and nan.value is None and b"not JSON compliant" in nan.stderr
    large = member.function("operator:mul", "x", 17 * MIB)
    assert large.code == 1 and large.value is None and b"larger than" in large.stderr
    fits = member.function("operator:mul", "x", 15 * MIB)
    assert fits.value is not None and len(fits.value) == 15 * MIB + 2


def test_programs(member: Calls) -> None:
    ended = member.exec("sh", "-c", "cat; echo e >&2; exit 4", stdin=b"in")
    assert (ended.code, ended.stdout, ended.stderr) == (4, b"in", b"e\n")
    assert member.exec("sh", "-c", "kill -TERM $$").signal == 15
    assert member.exec("/bin/echo", "a b", "").stdout == b"a b \n"
    assert member.exec("./run", files={}).not_started == "cannot execute the program: error 2"
    missing = member.exec("no-such-program")
    assert (missing.code, missing.caller_fault, missing.not_started) == (None, True, "cannot execute the program: error 2")
    assert member.exec("/etc/passwd").not_started == "cannot execute the program: error 13"


def test_an_environment(fn_node: FnNode) -> None:
    with fn_node.member(env={"A": "1", "B": "2", "PATH": "/usr/bin:/bin"}, user="games") as calls:
        lines = calls.exec("env", env={"B": "3", "C": ""}).stdout.decode().split("\n")
        assert sorted(filter(None, lines)) == ["A=1", "B=3", "C=", "HOME=/usr/games", "LOGNAME=games", "PATH=/usr/bin:/bin", "USER=games"]
        told = calls.says(
            "import os\nprint(*sorted(f'{k}={v}' for k, v in os.environ.items() if k != 'LC_CTYPE'))", env={"B": "3", "C": ""}
        )
        assert told.split() == ["A=1", "B=3", "C=", "HOME=/usr/games", "LOGNAME=games", "PATH=/usr/bin:/bin", "USER=games"]
        assert calls.exec("id").stdout == b"uid=5(games) gid=60(games) groups=60(games)\n"


def test_much_input_and_output(member: Calls) -> None:
    data = bytes(range(256)) * 4096 * 3
    echo = "import sys\ndata = sys.stdin.buffer.read()\nsys.stdout.buffer.write(data)\nsys.stderr.buffer.write(data[:70000])\n"
    ended = member.python(echo, stdin=data, output_bytes=4 * MIB)
    assert ended.code == 0 and ended.stdout == data and ended.stderr == data[:70000]
    assert member.exec("cat", stdin=data, output_bytes=4 * MIB).stdout == data
    for size in (65_535, 65_536, 65_537):
        assert member.exec("wc", "-c", stdin=data[:size]).stdout == b"%d\n" % size
    long = "x = '" + "y" * 300_000 + "'\nprint(len(x))\n"
    assert member.says(long) == "300000\n"


def test_files_in_and_out(member: Calls) -> None:
    files = {"a.txt": b"A", "deep/er/b.bin": bytes(100_000), "empty": b""}
    ended = member.exec(
        "sh",
        "-c",
        "ls -lR > list; mkdir -p out/1 out/2; "
        "echo 1 > out/1/x.log; echo 2 > out/2/y.log; echo 3 > out/2/z.txt; cp a.txt 'out/[a]'; touch .hid",
        files=files,
        outputs=["list", "out/*/*.log", "deep/er/b.bin", "nothing", "no/thing", "out/[[]a]", "out/?/[!xy]*", "empty", "*"],
    )
    assert ended.code == 0 and ended.files_problem == ""
    assert {name: ended.files[name] for name in ended.files if name != "list"} == {
        "out/1/x.log": b"1\n",
        "out/2/y.log": b"2\n",
        "out/2/z.txt": b"3\n",
        "out/[a]": b"A",
        "deep/er/b.bin": bytes(100_000),
        "empty": b"",
        "a.txt": b"A",
    }
    assert b"nobody nogroup  1" in ended.files["list"]
    again = member.says("import os\nprint(os.listdir())")
    assert again == "[]\n"


def test_an_executable_file(member: Calls) -> None:
    job = member.job("exec", argv=["./run", "x"])
    ended = member.run(msgspec.structs.replace(job, files=(File("run", b"#!/bin/sh\necho ran $1\n", True),)))
    assert ended.stdout == b"ran x\n"


def test_outputs_that_cannot_be_brought_back(member: Calls) -> None:
    job = member.job(
        "exec", argv=["sh", "-c", "head -c 3000 /dev/zero > big; mkfifo pipe; mkdir d; ln -s /etc/shadow s; ln -s /proc/self/maps m"]
    )
    for name, problem in (
        ("big", "big: the output files are larger than allowed"),
        ("pipe", "pipe: is not a regular file"),
        ("d", "d: is not a regular file"),
        ("s", "s: cannot be opened"),
        ("m", "m: cannot be opened"),
    ):
        ended = member.run(msgspec.structs.replace(job, outputs=(name,), output_files_bytes=2999))
        assert (ended.code, ended.files, ended.files_problem) == (0, {}, problem)
    assert member.exec("sh", "-c", "ln -s passwd x; cp /etc/passwd .", outputs=["x"]).files["x"].startswith(b"root:")
    ended = member.exec("sh", "-c", "for i in $(seq 1100); do : > f$i; done", outputs=["f*"])
    assert len(ended.files) == 1024 and ended.files_problem.endswith("one of too many output files")


def test_outputs_that_never_end(member: Calls) -> None:
    """What a call leaves could keep its supervisor busy for hours, and so make the program's fault the platform's."""
    ended = member.python("import os\nfor i in range(400): os.symlink('.', f'l{i}')", outputs=["*/*/*/*/*"])
    assert (ended.code, ended.files, ended.spoiled) == (0, {}, "")
    assert "is not a regular file" in ended.files_problem
    name = "a" * 255
    ended = member.python(f"open({name!r}, 'w')", outputs=["*a*a*a*a*a*a*a*a*a*a*b", "*a*a?*[a]*[!b]", "***"])
    assert (ended.code, list(ended.files), ended.files_problem) == (0, [name], "")


def test_a_preload_and_a_warmup(fn_node: FnNode) -> None:
    with fn_node.member(
        preload=["decimal", "sqlite3"], warmup="import decimal\ndecimal.getcontext().prec = 5\nTABLE = list(range(10))\n"
    ) as calls:
        assert calls.says("import sys\nprint('decimal' in sys.modules, '_sqlite3' in sys.modules)") == "True True\n"
        assert calls.says("import decimal\nprint(decimal.Decimal(1) / 3)") == "0.33333\n"
        tamper = "import __warmup__\nprint(sum(__warmup__.TABLE))\n__warmup__.TABLE.append(100)\n"
        assert calls.says(tamper) == "45\n"
        assert calls.says(tamper) == "45\n"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"preload": ["no_such_module"]}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"warmup": "def f():\n    1/0\nf()"}, 'File "<warmup>", line 2, in f\n    1/0'),
        ({"warmup": "x = = 1"}, "SyntaxError"),
        ({"warmup": "import sys; sys.exit(3)"}, "SystemExit: 3"),
        ({"warmup": "import os; os._exit(3)"}, "the pool's interpreter does not start"),
        ({"warmup": "import os; os.kill(os.getpid(), 9)"}, "it was killed"),
        ({"python": "no-such-python"}, "cannot execute the interpreter"),
        ({"user": "nobody-such"}, "no user 'nobody-such' in the sandbox's /etc/passwd"),
    ],
)
def test_members_that_cannot_be(fn_node: FnNode, more: dict[str, object], text: str) -> None:
    plan = fn_node.plan(**more)  # type: ignore[arg-type]
    before = fn_node.backend.leftovers()
    with pytest.raises(InvalidRequest) as caught:
        fn_node.wait(fn_node.backend.create(plan))
    assert text in str(caught.value)
    assert fn_node.backend.leftovers() == before


def test_a_member_without_an_interpreter(fn_node: FnNode) -> None:
    with fn_node.member(python="") as calls:
        assert calls.exec("echo", "1").stdout == b"1\n"
        ended = calls.python("1")
        assert (ended.not_started, ended.caller_fault) == ("this pool keeps no interpreter warm", True)


def test_random_numbers_differ_from_call_to_call(fn_node: FnNode) -> None:
    with fn_node.member(preload=["random", "ssl", "uuid"]) as calls:
        source = "import random, ssl, uuid, os\nprint(random.random(), ssl.RAND_bytes(8), uuid.uuid4(), hash('a'))"
        first, second = (calls.says(source).split() for _ in range(2))
        assert not set(first[:-1]) & set(second[:-1])
        assert first[-1] == second[-1]


@pytest.mark.slow
def test_what_makes_forks_cheap_is_not_seen_in_them(fn_node: FnNode) -> None:
    told = "import os, subprocess\nprint(os.environ.get('LD_BIND_NOW'), subprocess.run(['printenv', 'LD_BIND_NOW']).returncode)"
    with fn_node.member(preload=["subprocess"]) as calls:
        assert calls.says(told) == "None 1\n"
    with fn_node.member(env={"LD_BIND_NOW": "yes"}) as calls:
        assert calls.says(told).split() == ["yes", "yes", "0"]


def test_a_fork_faults_in_few_pages(fn_node: FnNode) -> None:
    with fn_node.member(preload=["resource"]) as calls:
        assert int(calls.says("import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)")) < 165


def test_the_zygote_is_python_3_8() -> None:
    ast.parse((SRC / "runtime" / "fncall" / "zygote.py").read_text(), feature_version=(3, 8))


def test_the_programs_are_static() -> None:
    for name in ("dsec-calld", "dsec-forkin.so"):
        told = subprocess.run(["readelf", "-d", SRC / "_native" / name], capture_output=True, text=True, check=True).stdout
        assert "NEEDED" not in told
