"""Tests of commands that are ended by a signal, or whose output cannot be written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.command import COMMAND

HANGUP = pytest.param(signal.SIGHUP, marks=pytest.mark.deep)
"""SIGHUP, which is handled like SIGTERM."""


@pytest.mark.parametrize("words", [["config-schema"], ["--help"]])
def test_output_that_cannot_be_written_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, "tierstore: No space left on device\n")


@pytest.mark.parametrize(
    "room", ["tierstore.cli.app", "tierstore.cli.plan", "typer", "rich.table", "pydantic"]
)
def test_command_interrupted_during_imports_prints_nothing(room: str) -> None:
    program = (
        "import os, signal, sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Interrupting(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == sys.argv[1]:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells make background jobs ignore it
        "sys.meta_path.insert(0, Interrupting())\n"
        "from tierstore.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, room], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, HANGUP, signal.SIGINT])
def test_a_command_that_gets_sigterm_removes_its_folder(tmp_path: Path, number: signal.Signals) -> None:
    sizes = ["--size", "16MiB", "--page-sizes", "256KiB", "--idle", "3600"]  # never ends by itself
    words = ["bench", "nvme", "--dir", str(tmp_path), *sizes]
    program = f"import os; os.dup2(1, 2)\n{forked.TIERSTORE}"  # stdout and stderr share a pipe
    with forked.running(program, *words) as child:
        assert child.stdout.readline() == "pages of 256 KiB\n"
        child.send_signal(number)
        assert child.wait() == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, HANGUP, signal.SIGINT])
def test_a_command_that_gets_sigterm_within_a_finalizer_exits(number: signal.Signals) -> None:
    # Python discards an exception that a handler raises while an object is being finalized.
    program = (
        "import os, signal, sys\n"
        "import tierstore.cli.app as app\n"
        "class Ending:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), int(sys.argv.pop()))\n"
        "def work():\n"
        "    Ending()\n"
        "    signal.sigtimedwait([], 60)\n"
        "for number in (signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "app.app = work\n"
        "app.main()\n"
    )
    command = [sys.executable, "-c", program, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == (-number if number == signal.SIGINT else 128 + number)


ENDING = """
import os, signal, sys, time
import tierstore.cli.app as app
def work():
    try:
        {begin}
    finally:
        {end}
        print("cleaned up", flush=True)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
app.app = work
app.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, HANGUP])
def test_a_signal_whose_exception_a_library_drops_still_ends_the_command(number: signal.Signals) -> None:
    begin = f"""
        try:
            os.kill(os.getpid(), {int(number)})
            time.sleep(60)
        except BaseException:
            pass
        time.sleep(60)"""
    program = ENDING.format(begin=begin.strip(), end="pass")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (128 + number, "cleaned up\n")


def test_a_clean_up_is_not_interrupted_by_the_signal_that_began_it() -> None:
    begin = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    end = """
        try:
            time.sleep(1.2)  # longer than until the exception is raised again
            raise ValueError("of the clean-up")
        except ValueError:
            time.sleep(1.2)"""
    program = ENDING.format(begin=begin, end=end.strip())
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "cleaned up\n")
