"""Starts processes with SGLang in them (see ``child``), and sends scenarios to them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4_000


class ScenarioError(AssertionError):
    """A scenario failed. ``kind`` is the name of the exception's class in the other process."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Worker:
    """A process with SGLang in it. It is started when it is needed, and again after it was killed."""

    def __init__(self, python: Path, log: Path) -> None:
        self._python = python
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, what: str, *, timeout_s: float = 600.0, **arguments: Any) -> Any:
        """Carry out a scenario and return its result. A scenario that takes longer than the timeout hangs."""
        self.send(what, **arguments)
        return self.receive(timeout_s)

    def send(self, what: str, **arguments: Any) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes the stack of every thread
            self._process.wait(30)
            raise ScenarioError("Hang", f"no answer in {timeout_s:.0f} s\n{self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise ScenarioError("Exit", f"exit code {self._process.wait(30)}\n{self._tail()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise ScenarioError(answer["error"], f"{answer['message']}\n{answer['trace']}")
        return answer["result"]

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        self.close()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # SGLang's modules take half a minute to compile
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "tests.sglang.child"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TAIL:]


def together(
    workers: Sequence[Worker], what: str, setup: Mapping[str, Any], meeting: Path, **rest: Any
) -> list[Any]:
    """Carry out a scenario on several ranks at once, one per worker, and return their results."""
    timeout_s = rest.pop("timeout_s", 600.0)
    for rank, worker in enumerate(workers):
        ranked = {**setup, "rank": rank, "ranks": len(workers), "meeting": str(meeting)}
        worker.send(what, setup=ranked, **rest)
    answers = []
    failure: ScenarioError | None = None
    for worker in workers:
        try:
            answers.append(worker.receive(timeout_s))
        except ScenarioError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return answers
