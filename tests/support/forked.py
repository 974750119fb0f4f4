"""Runs Python programs in separate processes in which torch and the store are already imported.

A server process imports torch and the store once, and forks a child for each program. A child is a real process with
its own PID, file descriptors and exit code. Starting a child takes a hundredth of the time of importing torch. Tests of
the start of a Python process (imports, hash seeds, options of the interpreter) use ``subprocess`` instead.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

CHECKOUT = Path(__file__).parents[2]
TIERSTORE = "from tierstore.cli import main; main()"
"""The program ``tierstore``. Pass the words of its command line as arguments."""
IMPORTED = ("torch", "tierstore.store", "tierstore.cli.app", "tests.support.pages")
LONGEST_S = 240.0


class Forked:
    """A running program, with the parts of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: Process ID.
        stdin, stdout: Pipes to and from the program. Only set if ``running`` started it.
        returncode: Exit code, or minus the number of the signal that ended the program. None until ``wait`` returns.
    """

    stdin: IO[str]
    stdout: IO[str]

    def __init__(
        self,
        program: str,
        arguments: Sequence[str | Path],
        files: Sequence[int],
        cwd: Path = CHECKOUT,
        env: Mapping[str, str] | None = None,
        strict: bool = False,
        imported: tuple[str, ...] = IMPORTED,
    ) -> None:
        """Start a program. ``files`` are its standard input, output and error. See ``run`` for the other arguments."""
        request = {
            "program": program,
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd),
            "env": {**os.environ, **(env or {})},
            "strict": strict,
        }
        told, status = os.pipe()
        self._told = os.fdopen(told)
        try:
            socket.send_fds(_server(imported), [json.dumps(request).encode()], [*files, status])
        finally:
            os.close(status)
        line = self._told.readline()
        if not line:
            raise RuntimeError(f"the fork server that imports {', '.join(imported)} has exited")
        self.pid = int(line)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process unless it has ended."""
        if self.returncode is None and not self._has_ended(0):
            with suppress(ProcessLookupError):  # the process ended after the check
                os.kill(self.pid, number)

    def wait(self, timeout: float = LONGEST_S) -> int:
        """Wait for the end of the process and return ``returncode``.

        Raises:
            subprocess.TimeoutExpired: The process has not ended after ``timeout`` seconds.
        """
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def _has_ended(self, timeout: float) -> bool:
        return bool(_readable([self._told.fileno()], timeout))

    def end(self) -> None:
        """Kill the process if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def run(
    program: str, *arguments: str | Path, given: str = "", timeout: float = LONGEST_S, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to completion and return what it wrote.

    Args:
        program: Source text of the program.
        arguments: Its ``sys.argv[1:]``.
        given: Its standard input.
        timeout: Seconds after which the program is killed.
        more: ``cwd``, the folder in which it runs and from which it can import; ``env``, environment variables in
            addition to those of the tests; ``strict``, whether its warnings are errors; ``imported``, the modules
            that are already imported. Each such tuple of modules has its own fork server.

    Raises:
        subprocess.TimeoutExpired: The program was killed, because it took too long.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        child = Forked(program, arguments, [file.fileno() for file in files], **more)
        stack.callback(child.end)
        ended = child.wait(timeout)
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(arguments, ended, files[1].read(), files[2].read())


@contextmanager
def running(program: str, *arguments: str | Path, **more: Any) -> Iterator[Forked]:
    """Start a program with pipes for its standard input and output. Kill it at the end if it is still running.

    The arguments are those of ``run``. The program shares the standard error of the tests.
    """
    given, into = os.pipe()
    out, said = os.pipe()
    with open(into, "w", encoding="utf-8") as stdin, open(out, encoding="utf-8") as stdout:
        try:
            child = Forked(program, arguments, (given, said, 2), **more)
        finally:
            os.close(given)
            os.close(said)
        child.stdin, child.stdout = stdin, stdout
        try:
            yield child
        finally:
            child.end()
            with suppress(BrokenPipeError):  # the process has ended without reading all of its input
                stdin.close()


def examine(command: Sequence[str], *, timeout: float, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the process that checks a directory before the store opens it.

    This replaces ``subprocess.run`` in the product.
    """
    program, *arguments = command[2:]
    imported = ("runpy", "xxhash", "tierstore.nvme.catalogue_entry", "tierstore.nvme.directory_layout")
    return run(program, *arguments, timeout=timeout, imported=imported)


@cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """Start a server that imports these modules, and return the socket that takes its requests."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"from tests.support.forked import _serve; _serve({there.fileno()}, {imported})"
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        pass_fds=[there.fileno()],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
    )
    there.close()

    def end() -> None:
        here.close()
        server.wait()

    atexit.register(end)
    return here


def _serve(number: int, imported: tuple[str, ...]) -> None:
    """Fork a child for each request, until the other end of the socket is closed."""
    atexit.register(_leave)  # registered first, and therefore called last
    for name in imported:
        importlib.import_module(name)
    for finalizer in vars(weakref.finalize)["_registry"]:
        finalizer.atexit = False  # torch has over a hundred, which take longer in a child than most programs
    gc.collect()
    gc.freeze()  # so that garbage collections in a child do not copy the pages of imported objects
    requests = socket.socket(fileno=number)
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready in _readable([number, *children]):
            if ready != number:
                child, status = children.pop(ready)
                _, ended = os.waitpid(child, 0)
                _tell(status, os.waitstatus_to_exitcode(ended))
                os.close(status)
                os.close(ready)
                continue
            message, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                return
            request = json.loads(message)
            child = os.fork()
            if child == 0:
                requests.close()
                for descriptor, (_, status) in children.items():
                    os.close(descriptor)
                    os.close(status)
                _live(request, files)
                return
            *theirs, status = files
            for file in theirs:
                os.close(file)
            children[os.pidfd_open(child)] = child, status
            _tell(status, child)


def _readable(numbers: Sequence[int], timeout: float | None = None) -> list[int]:
    poll = select.poll()  # select() does not accept descriptors above 1023
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if timeout is None else timeout * 1000)]


def _tell(status: int, number: int) -> None:
    with suppress(BrokenPipeError):  # a test that has failed no longer reads
        os.write(status, f"{number}\n".encode())


def _live(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Run the requested program. Called in the child."""
    global _exit_code
    for number, file in enumerate(files):
        if number < 3:
            os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = ["-c", *request["arguments"]]
    if request["strict"]:
        warnings.simplefilter("error")
    _exit_code = 1
    try:
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        _exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    _exit_code = 0


_exit_code = 0


def _leave() -> None:
    """End the process without finalizing the imported modules, which would take longer than most programs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code)
