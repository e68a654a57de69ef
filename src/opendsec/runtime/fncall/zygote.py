# SPDX-License-Identifier: Apache-2.0
"""The warm interpreter of a member: imports what its pool declares, then is forked for each call.

Runs inside the image, by whatever Python is there (3.8 or later), as a program of its own: nothing of this package is at hand. Its
descriptors: 3 the supervisor, 4 this text, 5 forkin.so, 6 what to warm up with. A fork goes on in native/source.h or in `run`, where
the user's code must see what `python3 main.py` would have shown it.
"""

from __future__ import annotations

# What a call needs of other modules is looked up once. To import a module again, or to look into one, writes to it (its count of
# references), and what is written to is copied.
import atexit
import builtins
import ctypes
import functools
import gc
import importlib
import io
import json
import linecache
import marshal
import os
import signal
import struct
import sys
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


BUFFER, HEAD = 128 << 10, 40  # as in forkin.c
RAN = 2  # as in source.h
POOL = 16384  # of CPython's allocator since 3.10, with a head of 48 bytes


def warm_up() -> str:
    """Import and run what was asked for; returns the calls' working directory. Whatever fails goes to standard error as a traceback of its
    own, and ends us."""
    with os.fdopen(6, "rb") as file:
        preload, warmup, workdir, binds = marshal.loads(file.read())
    if not binds:
        os.environ.pop("LD_BIND_NOW", None)  # calld's, for this process alone
    sys.argv = [""]
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:
            fail(f"preload of {name!r} failed", error)
    if "numpy" in sys.modules:
        try:
            importlib.import_module("numpy.random")  # numpy leaves that to its first use, which would be in each call
        except ImportError:
            pass
    if warmup:
        module = sys.modules["__warmup__"] = types.ModuleType("__warmup__")
        remember("<warmup>", warmup)
        try:
            exec(compile(warmup, "<warmup>", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            fail("warmup failed", error)
    return str(workdir)


def fail(what: str, error: BaseException) -> NoReturn:
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    print(what + ":", file=sys.stderr)
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()
    os._exit(64)


def remember(filename: str, source: str) -> None:
    """Make the source known to tracebacks: there is no such file. Its lines are those of a file, where fewer characters end one."""
    text = io.StringIO(without_mark(source), None).readlines()
    if text and text[-1][-1] != "\n":
        text[-1] += "\n"
    lines[filename] = (len(source), None, text, filename)


def without_mark(source: str) -> str:
    """A byte order mark, as files may have it."""
    return source[1:] if source[:1] == "\ufeff" else source


def load(workdir: str) -> tuple[Callable[[], int], Callable[[], int], memoryview, memoryview]:
    """forkin: what to call first, what to call for calls, and views of what that tells of one, first what `loads` takes, then the rest."""
    # PyDLL: the interpreter lock stays with us, so a fork is in the state that one by os.fork() would be in.
    library = ctypes.PyDLL("/proc/self/fd/5")
    pointer = ctypes.c_void_p
    fork = ctypes.cast(ctypes.CDLL(None).fork, pointer)
    after = ctypes.cast(ctypes.pythonapi.PyOS_AfterFork_Child, pointer)
    library.forkin_serve.argtypes = [ctypes.c_int, pointer, pointer, pointer]
    library.forkin_serve.restype = ctypes.c_long
    library.forkin_pack.argtypes = [pointer]
    # Forks read the call by views, which need nothing of ctypes: what a fork does not use it does not copy.
    buffer = ctypes.create_string_buffer(BUFFER)
    call = (ctypes.c_int64 * 8)()
    where = ctypes.create_string_buffer(os.fsencode(workdir))
    plain = tools()
    call[0], call[1], call[7] = ctypes.addressof(buffer), ctypes.addressof(where), ctypes.addressof(plain) if plain else 0
    kept.extend(locals().values())  # what is written to at a function's end is copied, too
    view, numbers = memoryview(buffer).cast("B"), memoryview(call).cast("B").cast("q")
    serving = functools.partial(library.forkin_serve, 3, fork, after, pointer(ctypes.addressof(call)))
    return functools.partial(library.forkin_pack, after), serving, view, numbers


def tools() -> ctypes.Array[ctypes.c_int64] | None:
    """What native/source.h runs plain calls with, if this interpreter has it all."""
    names = "PyMarshal_ReadObjectFromString PyTuple_GetItem PyUnicode_CompareWithASCIIString PyUnicode_AsUTF8AndSize PyDict_Size"
    names += " PyDict_GetItem PyDict_Clear Py_CompileStringObject PyEval_EvalCode PyObject_CallObject PyErr_Clear PyList_Size Py_DecRef"
    streams = ("stdout", "__stdout__", "stderr", "__stderr__")
    flushes = [getattr(getattr(sys, name), "flush", None) for name in streams]
    if seed is not None or len(main.__dict__) > 10 or None in flushes or not all(hasattr(ctypes.pythonapi, name) for name in names.split()):
        return None
    young = 1 if sys.version_info < (3, 13) else 2  # since then it is not sure what that takes in
    objects = [main.__dict__, default[1], sys.modules, "threading", exits, exits(), sys.__dict__, gc.get_objects, collect, (2,), (young,)]
    objects += [*streams, *(getattr(sys, name) for name in streams), *flushes]
    own = [thing for item in main.__dict__.items() for thing in item]
    kept.append((objects, own))
    places = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in names.split()]
    places += [recursion(), *map(id, objects), len(sys.modules), sys.version_info[1], len(own) // 2, *map(id, own)]
    return (ctypes.c_int64 * len(places))(*places)


def recursion() -> int:
    """Where it says how much deeper functions may call each other (CPython since 3.11), or 0: where that goes along with the limit."""
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    words = (ctypes.c_int * 64).from_address(state())
    limit, found = sys.getrecursionlimit(), set(range(1, 64))
    for probe in (12347, 23456):
        sys.setrecursionlimit(probe)
        found = {at for at in found if words[at] == probe and probe - 100 < words[at - 1] < probe}
    sys.setrecursionlimit(limit)
    return ctypes.addressof(words) + 4 * (found.pop() - 1) if len(found) == 1 else 0


def begin_pools() -> None:
    """Take what is left of the allocator's pools, so that forks begin new ones: a new one is written to in one page, where it begins, but
    one in use at its head and at its free blocks."""
    empty = sys.getsizeof(b"")
    for size in range(16, 513, 16):
        for number in range(2000):
            block = object() if size == 16 else float(number) if size == 32 else bytes(size - empty)
            kept.append(block)
            if id(block) % POOL == 48:
                break


def begin_heap() -> None:
    """Likewise of what malloc() has at hand, which lies all over its heap: then forks take what they need at its end, side by side. That is
    10 pages less for a quarter of a MiB in each member."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_size_t
    malloc.argtypes = [ctypes.c_size_t]
    taken = 0
    for size in (*range(8192, 1024, -1024), *range(1032, 8, -16)):
        last = in_a_row = 0
        while in_a_row < 4 and taken < 1 << 20:  # another allocator than glibc's may have no such end
            at = malloc(size)
            in_a_row = in_a_row + 1 if 0 < at - last <= size + 32 else 0
            last = at
            taken += size


def serve(serving: Callable[[], int], view: memoryview, numbers: memoryview, workdir: str, space: dict[str, object]) -> NoReturn:
    """Returns in no process: forks run their call."""
    code: int | str = 0
    left = RAN
    count = len(sys.modules)
    try:
        left = serving()
    except BaseException as error:  # of the call's program
        code = end(error)
    if left < 0:
        os._exit(0)  # the supervisor is gone
    if left == RAN:
        finish(code, None, 0, 0, space, workdir if len(sys.modules) != count else "")
    body_fd = numbers[3]
    if body_fd < 0:
        run(view[HEAD : HEAD + numbers[2]], numbers[4], numbers[5], numbers[6], workdir, space)
    parts = []
    while True:
        part = os.read(body_fd, 1 << 20)
        if not part:
            break
        parts.append(part)
    os.close(body_fd)
    run(b"".join(parts), numbers[4], numbers[5], numbers[6], workdir, space)


def run(body: memoryview | bytes, value: int, value_len: int, elsewhere: int, workdir: str, space: dict[str, object]) -> NoReturn:
    """`value`: where a function's goes, `value_len`: how much fits there, `elsewhere`: the working directory is to be entered."""
    kind, source, filename, function, args, kwargs, env = loads(body)
    lines.pop(default[1], None)
    if elsewhere:
        os.chdir(workdir)
    if env:
        os.environ.update(env)
    modules = sys.modules
    if seed is not None:
        seed()
    code: int | str = 0
    answer = None
    count = len(modules)
    try:
        if kind == "source":
            if filename == default[0]:
                path = default[1]
            else:
                path = os.path.join(workdir, filename)
                sys.argv[0] = filename
                space["__file__"] = path
            remember(path, source)
            exec(compile(without_mark(source), path, "exec", dont_inherit=True), space)
        else:
            sys.argv[0] = "-c"
            del space["__file__"]
            answer = apply(function, args, kwargs)
    except BaseException as error:
        code = end(error)
    finish(code, answer, value, value_len, space, workdir if len(modules) != count else "")


def end(error: BaseException) -> int | str:
    return exit_code(error) if isinstance(error, SystemExit) else report(error)


class NoFunction(Exception):
    """What was asked for is not there."""


def apply(function: str, args: bytes, kwargs: bytes) -> bytes:
    module, _, path = function.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise NoFunction(f"there is no module {error.name!r}") from None
        raise
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise NoFunction(f"module {module!r} has no {path!r}") from None
    if not callable(found):
        raise NoFunction(f"{path!r} of module {module!r} cannot be called")
    return json.dumps(found(*json.loads(args), **json.loads(kwargs)), allow_nan=False).encode()


def exit_code(end: SystemExit) -> int:
    """As the interpreter has it."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    try:
        sys.stdout.flush()
        print(end.code, file=sys.stderr)
    except BaseException:
        pass
    return 1


def report(error: BaseException) -> int | str:
    """Print the traceback, without our own frames; -2: ended by Ctrl-C."""
    if isinstance(error, NoFunction):
        return str(error)
    kept_source = lines.get(default[1])
    if kept_source is not None and len(kept_source) == 1:
        remember(default[1], str(kept_source[0]()))  # itself, linecache would look for the file and for loaders first: 20 pages
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    while trace is not None and trace.tb_frame.f_code is apply.__code__:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        sys.stdout.flush()
    except BaseException:
        pass
    try:
        if sys.excepthook is not sys.__excepthook__:
            try:
                sys.excepthook(type(error), error, trace)
            except BaseException as second:
                print("Error in sys.excepthook:", file=sys.stderr)
                if second.__context__ is error:
                    second.__context__ = None
                traceback.print_exception(type(second), second, second.__traceback__.tb_next if second.__traceback__ else None)
                print("\nOriginal exception was:", file=sys.stderr)
                traceback.print_exception(type(error), error, trace)
        elif sys.stderr is not None:  # else it would be printed to sys.stdout
            traceback.print_exception(type(error), error, trace)
    except BaseException:
        pass
    return -2 if isinstance(error, KeyboardInterrupt) else 1


def finish(code: int | str, answer: bytes | None, value: int, value_len: int, space: dict[str, object], workdir: str) -> NoReturn:
    """What the interpreter does at its end, as far as anybody can see it, and without taking apart what the call never touched.
    `workdir`: beneath which modules may have come to be, or nothing."""
    message, status = (code, 1) if isinstance(code, str) else (None, code)
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException:
            pass
    if exits():
        run_exits()
    if answer is not None and (not value or len(answer) > value_len - 8):
        print(f"ValueError: the function's value is larger than {value_len - 8} bytes as JSON", file=sys.stderr)
        status = 1
    elif answer is not None:
        deliver(1, answer, value)
    elif message is not None and value:
        deliver(2, message.encode("utf-8", "replace")[:4000], value)
    # Files that nobody closed are written when their objects go.
    out, err, plain_out, plain_err = (getattr(sys, name, None) for name in ("stdout", "stderr", "__stdout__", "__stderr__"))
    space.clear()
    if workdir:
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(workdir + "/"):
                module.__dict__.clear()
    try:
        collect()
    except BaseException:
        pass
    for stream, counts in ((out, True), (err, True), (plain_out, False), (plain_err, False)):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            if counts and status != -2:
                status = 120
            if counts and stream is out and err is not None:
                print(f"Exception ignored in: {out!r}\n{type(error).__name__}: {error}", file=err)
    if status == -2:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def deliver(kind: int, data: bytes, value: int) -> None:
    ctypes.memmove(value + 8, data, len(data))
    ctypes.memmove(value, struct.pack("<II", kind, len(data)), 8)


loads, Module, lines, collect = marshal.loads, types.ModuleType, linecache.cache, gc.collect
kept: list[object] = []
exits, run_exits = atexit._ncallbacks, atexit._run_exitfuncs

# The first traceback of an interpreter imports and sets up the parser's classes: once, here, and not in each call that fails (2 ms of 5).
remember("<first>", "1 / 0\n")
try:
    exec(compile("1 / 0\n", "<first>", "exec", dont_inherit=True), {})
except ZeroDivisionError as error:
    traceback.format_exception(type(error), error, error.__traceback__)
lines.clear()
# Likewise the first use of a type's attribute: where it was found is kept in a table, which forks share while they only read it.
exec(compile("print('', end='')\n", "<first>", "exec", dont_inherit=True), {})
for stream in (sys.stdout, sys.stderr):
    stream.flush()

workdir = warm_up()
# As much of a call's world as all have in common.
default = ("main.py", os.path.join(workdir, "main.py"))
sys.argv = [default[0]]
sys.orig_argv = ["python3", default[0]]
sys.path[0] = workdir
itself, main = sys.modules["__main__"], Module("__main__")
if sys.version_info < (3, 14):
    main.__annotations__ = {}
main.__dict__["__builtins__"] = builtins
main.__dict__["__cached__"] = None
sys.modules["__main__"] = main
seed = sys.modules["numpy.random"].seed if "numpy.random" in sys.modules else None
main.__dict__["__file__"] = default[1]
pack, serving, view, numbers = load(workdir)
lines[default[1]] = (lambda: str(loads(view[HEAD : HEAD + numbers[2]])[1]),)  # of the call, should it be asked for
os.close(4)
os.close(5)
collect()
begin_pools()
begin_heap()
gc.freeze()  # a collection in a fork touches, and so copies, nothing of what is here now
before = ctypes.pythonapi.PyOS_BeforeFork
before.restype = None
pack()
os.write(3, b"R")
before()
serve(serving, view, numbers, workdir, main.__dict__)
