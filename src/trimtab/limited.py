"""A child process with limits, which reads what strangers wrote: templates, tokenizers, columns, videos, models.

The parent asks one question at a time: a function of ours by name, and its arguments. The answer is bytes, which the
parent never unpickles. A child that takes too long, takes too much memory or crashes costs its question alone.
"""

import atexit
import importlib
import json
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import trimtab.errors
from trimtab.errors import TrimtabError

MEMORY_BYTES = 4 * 2**30  # a large tokenizer takes 0.6 GiB
STEP_CPU_S = 10  # from one `at` to the next
SILENT_S = 600  # without a word: disks of clusters are slow to import from
_MAX_ANSWER_BYTES = 2**32
_HEAD = struct.Struct(">cQ")
_PLACE, _ANSWER, _ERROR = b"@", b"=", b"!"
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CODE = "from trimtab.limited import main; main()"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of Linux' sched.h
_FORBIDDEN = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "os.system")


class ChildEndedError(TrimtabError):
    """Raised when a child ended without an answer: `place` is what it read then, `reason` why it ended."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


# -- in the child -----------------------------------------------------------------------------------------------------


def limit_process(*, memory_bytes: int) -> None:
    """Bound the memory of this process; it writes no core file. Windows has no such limits.

    A child of a bounded process has at most what that one has.
    """
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    memory_bytes = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def leave_network() -> bool:
    """Say whether this process now is in an empty network, which C libraries cannot leave; call it before any thread.

    It takes Linux, and a kernel that allows new namespaces to everybody or to this user.
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    unshare = ctypes.CDLL(None, use_errno=True).unshare
    # root alone keeps its rights on files; everybody else needs a user namespace for it
    return any(unshare(flags) == 0 for flags in (_NEW_NETWORK, _NEW_USER | _NEW_NETWORK))


class _Channel:
    """The way to the parent; `file` is None in every process that is no limited child."""

    file: BinaryIO | None = None


def is_limited() -> bool:
    """Return whether this process is such a child."""
    return _Channel.file is not None


def at(place: str, *, cpu_s: int = STEP_CPU_S) -> None:
    """Tell the parent what is read next, and allow `cpu_s` seconds of processor time for it."""
    if _Channel.file is None:
        return
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, inside of C libraries as well
    _send(_PLACE, f"{cpu_s} {place}".encode())


def main() -> None:
    """Set limits first, then take questions until the parent closes the pipe."""
    _Channel.file = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer
    memory_bytes, may_connect = int(sys.argv[1]), sys.argv[2] == "network"
    if not may_connect:
        leave_network()
    limit_process(memory_bytes=memory_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends its children
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, questions), daemon=True).start()
    while True:
        at("the question", cpu_s=60)  # what answers has to be imported
        _send(*_answer(questions.get(), may_connect=may_connect))
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)


def _listen(pipe: BinaryIO, questions: queue.SimpleQueue[bytes]) -> None:
    """Hand on questions; end the process with the pipe, whatever it is doing."""
    while head := pipe.read(_HEAD.size):
        questions.put(pipe.read(_HEAD.unpack(head)[1]))
    os._exit(0)


def _answer(question: bytes, *, may_connect: bool) -> tuple[bytes, bytes]:
    try:
        function, folder, path, arguments = pickle.loads(question)  # noqa: S301 - our own parent's
        sys.path[:] = path
        os.chdir(folder)
        given = _loaded(arguments)
        module, _, name = function.partition(":")
        work = getattr(importlib.import_module(module), name)
        if not may_connect:
            _watch()
        answer: bytes = work(*given)
    except MemoryError:
        return _ERROR, json.dumps({"memory": True}).encode()
    except TrimtabError as error:
        return _ERROR, json.dumps({"class": type(error).__name__, "said": str(error)}).encode()
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError)
        return _ERROR, json.dumps({"imported": error.name, "said": str(error), "absent": absent}).encode()
    except OSError as error:
        if error.errno is None:
            return _ERROR, json.dumps({"class": "SampleError", "said": str(error)}).encode()
        named = None if error.filename is None else str(error.filename)
        return _ERROR, json.dumps({"errno": error.errno, "said": error.strerror, "file": named}).encode()
    except Exception:
        return _ERROR, json.dumps({"trace": traceback.format_exc()}).encode()
    return _ANSWER, answer


def _loaded(arguments: bytes) -> Any:
    try:
        return pickle.loads(arguments)  # noqa: S301 - our own parent's
    except (AttributeError, ImportError) as error:
        raise _homeless(error) from None


def _homeless(error: Exception) -> TrimtabError:
    return TrimtabError(
        f"data are read in another process, which cannot import a rule of yours ({error}): put it into a module"
    )


@cache
def _watch() -> None:
    """Refuse what Python code asks of the network; the empty network stops C code, where the kernel allows it."""

    def refuse(event: str, _: tuple[object, ...]) -> None:
        if event in _FORBIDDEN:
            raise PermissionError(f"reading data needs no {event}")

    sys.addaudithook(refuse)


def _send(kind: bytes, content: bytes) -> None:
    assert _Channel.file is not None, "this is a child"
    message = memoryview(_HEAD.pack(kind, len(content)) + content)
    while message:
        message = message[_Channel.file.write(message) :]


# -- in the parent ----------------------------------------------------------------------------------------------------


class LimitedChild:
    """One child; it answers one question at a time and ends with this process.

    It stands where its parent does and imports what that one would, or stands in the folder `apart` and imports nothing
    of the working folder.
    """

    def __init__(
        self,
        *,
        network: bool = False,
        memory_bytes: int = MEMORY_BYTES,
        apart: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.network, self.memory_bytes, self._apart = network, memory_bytes, apart
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            [sys.executable, "-P", "-c", _CODE, str(memory_bytes), "network" if network else "alone"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries print of strangers' files is for no terminal
            bufsize=0,
            cwd=apart,
            env={**os.environ, **_ENVIRONMENT, **environment, "PYTHONPATH": os.pathsep.join(self._path())},
        )
        self._poll = None if sys.platform == "win32" else select.poll()
        if self._poll is not None and self._process.stdout is not None:
            self._poll.register(self._process.stdout, select.POLLIN)

    def ask(self, function: str, *arguments: object) -> bytes:
        """The bytes that `function` ("module:name") returns there; what it raises of ours is raised here.

        `ChildEndedError` where there is no answer; the child is gone then.
        """
        try:
            folder = self._apart or Path.cwd()
            question = pickle.dumps((function, folder, self._path(), pickle.dumps(arguments)))
        except (AttributeError, pickle.PicklingError) as error:
            raise _homeless(error) from None
        place, cpu_s = "the question", "0"
        try:
            self._write(_HEAD.pack(_ANSWER, len(question)) + question)
            while True:
                kind, size = _HEAD.unpack(self._read(_HEAD.size))
                if size > _MAX_ANSWER_BYTES:
                    raise _GoneError
                content = self._read(size)
                if kind != _PLACE:
                    break
                cpu_s, _, place = content.decode("utf-8", "replace").partition(" ")
        except (_GoneError, BrokenPipeError):
            raise ChildEndedError(place, self._end(cpu_s)) from None
        except BaseException:  # interrupted: an answer would be taken for the next one's
            self.close()
            raise
        if kind == _ANSWER:
            return content
        raise self._raised(json.loads(content), place)

    def _path(self) -> list[str]:
        """Return where this process finds modules; "" stands for the working folder."""
        found, here = [str(Path(folder).absolute()) for folder in sys.path], str(Path.cwd())
        return found if self._apart is None else [folder for folder in found if folder != here]

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        left = memoryview(message)
        while left:
            left = left[self._process.stdin.write(left) :]

    def _read(self, size: int) -> bytes:
        pipe, parts, left = self._process.stdout, list[bytes](), size
        assert pipe is not None
        while left:
            if self._poll is not None and not self._poll.poll(1000 * SILENT_S):
                raise _GoneError
            part = pipe.read(min(left, 1 << 20))
            if not part:
                raise _GoneError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _end(self, cpu_s: str) -> str:
        """Return why the child is gone; a silent one is ended."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self.close()
            return f"nothing came of it in {SILENT_S} s"
        self.close()
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {cpu_s} s of processor time"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it ends the process that reads it ({name})"

    def _raised(self, said: dict[str, Any], place: str) -> Exception:
        if "memory" in said:
            self.close()
            return ChildEndedError(place, f"it takes more than {self.memory_bytes / 2**30:g} GiB")
        if "class" in said:
            kind = getattr(trimtab.errors, said["class"], TrimtabError)
            error: Exception = kind(said["said"])
            return error
        if "imported" in said:
            return (ModuleNotFoundError if said["absent"] else ImportError)(said["said"], name=said["imported"])
        if "errno" in said:
            return OSError(said["errno"], said["said"], said["file"])
        return RuntimeError(f"a process that reads data failed:\n{said.get('trace')}")


class _GoneError(Exception):
    """Raised when the pipe to a child ends."""


@cache
def _idle(process: int) -> list[LimitedChild]:
    """Return children of this process that wait: one starts in a third of a second, a question takes a millisecond."""
    idle: list[LimitedChild] = []
    atexit.register(_close_all, idle, process)
    return idle


def _close_all(idle: list[LimitedChild], process: int) -> None:
    if os.getpid() == process:  # a fork of it has the list too
        for child in idle:
            child.close()


@contextmanager
def limited_child(*, network: bool = False, memory_bytes: int = MEMORY_BYTES) -> Iterator[LimitedChild]:
    """Give a child to the block: one that waits, or a new one. One of each kind is kept for the next block."""
    idle = _idle(os.getpid())

    def kind(one: LimitedChild) -> tuple[bool, int]:
        return one.network, one.memory_bytes

    child = next((one for one in idle if kind(one) == (network, memory_bytes)), None)
    if child is None:
        child = LimitedChild(network=network, memory_bytes=memory_bytes)
    else:
        idle.remove(child)
    try:
        yield child
    finally:
        is_wanted = memory_bytes == MEMORY_BYTES and not any(kind(one) == kind(child) for one in idle)
        if is_wanted and child.is_alive():
            idle.append(child)
        else:
            child.close()
