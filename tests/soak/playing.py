"""One client process as its parent sees it: the parent reads its output, may kill it, and learns how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from tests.soak.account import PATIENCE_S
from tests.soak.client import HANGS, WRONG, Role

CHECKOUT = Path(__file__).parents[2]
_ENDS_WITHIN_S = 2 * PATIENCE_S + 60.0
"""Additional seconds after which a client counts as hung. Most hung clients report the hang themselves, and earlier."""


@dataclass
class Ending:
    """The outcome of a client's run.

    Attributes:
        how: One of "closed", "killed", "wrong bytes", "hang" and "failed".
        why: The reason, with the end of the client's stderr if something went wrong.
        counts: The last counters that the client reported, by subject and name.
        rss: The client's memory in bytes after a quarter of its run ("start") and at the end ("end"), or None if it was
            not closed.
    """

    how: str
    why: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    rss: dict[str, int] | None = None


class Playing:
    """A running client. Threads read its output as it arrives."""

    def __init__(self, role: Role, home: Path) -> None:
        self.role = role
        self.home = home
        self._ready = Event()
        self._said: dict[str, Any] = {}
        self._errors: list[str] = []
        command = [sys.executable, "-m", "tests.soak", "--client", str(home), *arguments(role)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=CHECKOUT
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            Thread(target=self._listen, args=(self._process.stdout,), daemon=True),
            Thread(target=self._collect, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def kill_after(self, seconds: float, *, ready: bool) -> Ending:
        """Kill the client after ``seconds``, counted from its start or, if ``ready``, from when it is ready.

        Returns how the client ended; it may have ended by itself before.
        """
        if ready and not self._wait_ready():
            return self.end()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._ending("killed")
        return self.end()

    def end(self, more_s: float = 0.0) -> Ending:
        """Wait until the client ends by itself. A client that hangs is killed."""
        try:
            self._process.wait(self.role.seconds + more_s + _ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)  # makes it print the stacks of all its threads
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
            self._process.kill()
            return self._ending("hang")
        how = {0: "closed", WRONG: "wrong bytes", HANGS: "hang"}.get(self._process.returncode, "failed")
        return self._ending(how)

    def kill(self) -> None:
        """Kill the client if it is still running."""
        self._process.kill()
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)  # a forked child may hold the pipes for a moment
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _wait_ready(self) -> bool:
        """Wait until the client has read everything back. Returns False if it ends earlier or takes too long."""
        for _ in range(int(_ENDS_WITHIN_S / 0.1)):
            if self._ready.wait(0.1) or self._process.poll() is not None:
                return self._ready.is_set()
        return False

    def _ending(self, how: str) -> Ending:
        self._stop_listening()
        why = str(self._said.get("failed", "")) or f"exit status {self._process.returncode}"
        if how not in ("closed", "killed") or "stalls" in self._said.get("counts", {}):
            why += "\n" + "".join(self._errors[-150:])
        return Ending(how, why, self._said.get("counts", {}), self._said.get("rss"))

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            if line.endswith("\n"):  # a kill may truncate the last line
                self._said.update(json.loads(line))
                if self._said.get("ready"):
                    self._ready.set()

    def _collect(self, lines: IO[str]) -> None:
        for line in lines:
            self._errors.append(line)
            del self._errors[:-200]


def arguments(role: Role) -> list[str]:
    """Return the command-line arguments that run a client with this role."""
    named = ["--kind", role.kind, "--profile", role.profile, "--seed", str(role.seed)]
    return [*named, "--seconds", str(role.seconds), *(["--plant"] if role.plant else [])]
