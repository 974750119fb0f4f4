"""One of two ranks with the same KV, in a process of its own: ``python -m tests.adapters.rank_process RANK DEVICE``.

``RankProcess`` starts one and sends it commands. The ranks are real worker halves that share host memory. The test is
in the place of the half in the scheduler, and sends the same transfers to both ranks.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.pages import PATIENCE_S, chain
from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.build import host_nbytes
from tierstore.host.shared_memory import Handle, SharedMemory
from tierstore.page import PageLayout
from tierstore.types import Tier, Transfer

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LAYERS, TOKENS, WIDTH = 61, 64, 576


class RankProcess:
    """A running rank. Every method returns when the rank has done the work."""

    def __init__(
        self, rank: int, device: str, blocks: int, host: dict[str, Any], handle: Handle | None
    ) -> None:
        """Start the rank with ``blocks`` blocks of latents as in DeepSeek V3, which are the same on each rank."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.adapters.rank_process",
                str(rank),
                device,
                str(blocks),
                json.dumps(host),
            ]
            + [str(number) for number in handle or ()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        opened = self._answer()
        self.handle = Handle(*opened["handle"])
        self.copies: str = opened["copies"]
        self.pin_s: float = opened["pin_s"]
        """Seconds until the host memory was page-locked."""

    def ask(self, command: str) -> Any:
        """Send a command to the rank, and return its answer.

        ``save`` copies this rank's part of all blocks into host memory, ``spoil`` overwrites all blocks in HBM, and
        ``load`` copies all pages back. Their answers are numbers of bytes copied and seconds. ``digest`` returns a
        digest of all blocks.
        """
        self.send(command)
        return self._answer()

    def send(self, command: str) -> None:
        """Send a command without waiting for its end. Call ``answer`` then."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the answer to the last command that was sent."""
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate("close\n", timeout=PATIENCE_S)
        assert self._process.returncode == 0

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the rank has ended with exit code {self._process.wait()}"
        return json.loads(line)


def require_shared(devices: Sequence[str], blocks: int, host: dict[str, Any]) -> dict[str, float]:
    """Require that two ranks, on these devices, load the blocks that they have stored together.

    Return the seconds to page-lock the memory, and the throughput of both ranks together in bytes per second.
    """
    ranks = [RankProcess(0, devices[0], blocks, host, None)]
    ranks.append(RankProcess(1, devices[1], blocks, host, ranks[0].handle))
    try:
        if "cpu" not in devices:
            assert not any(rank.copies.startswith("threads") for rank in ranks), "memory is not page-locked"
        before = [rank.ask("digest") for rank in ranks]
        assert before[0] == before[1]
        saved = [rank.ask("save") for rank in ranks]
        page_nbytes = LAYERS * TOKENS * WIDTH * 2
        assert sum(each["nbytes"] for each in saved) == blocks * page_nbytes, (
            "a page was copied by both ranks"
        )
        assert all(each["nbytes"] for each in saved)
        for rank in ranks:
            rank.ask("spoil")
        assert before[0] not in [rank.ask("digest") for rank in ranks]
        for rank in ranks:
            rank.send("load")
        loaded = [rank.answer() for rank in ranks]
        assert [each["nbytes"] for each in loaded] == [blocks * page_nbytes] * RANKS
        after = [rank.ask("digest") for rank in ranks]
        assert after[0] == after[1]
        if host.get("codec", "none") == "none":
            assert after == before
        found = {"pin_s": max(rank.pin_s for rank in ranks)}
        for name, each in (("save", saved), ("load", loaded)):
            found[f"{name}_bytes_per_s"] = sum(one["nbytes"] / one["seconds"] for one in each)
        return found
    finally:
        for rank in ranks:
            rank.close()


class _Rank:
    def __init__(
        self, rank: int, device: str, blocks: int, host: dict[str, Any], handle: Handle | None
    ) -> None:
        self.blocks = blocks
        dice = torch.Generator().manual_seed(0)
        numbers = torch.randn(LAYERS, blocks, TOKENS * WIDTH, generator=dice).to(torch.bfloat16)
        self.tensors = list(numbers.to(device).view(LAYERS, blocks, TOKENS, WIDTH))
        heads = None if host.get("codec", "none") == "none" else Heads(1, WIDTH, "bfloat16")
        found = kv_layout(
            self.tensors, num_blocks=blocks, block_size=TOKENS, identity="m", shard=rank, heads=heads
        )
        config = Settings.of({"config": {"host": host}}).of_rank(RANKS, None, device, RANKS)
        layout = PageLayout.of(found.spec)
        self.shared = (
            SharedMemory.create(host_nbytes(config, layout)) if handle is None else SharedMemory.open(handle)
        )
        start = time.perf_counter()
        self.half = WorkerHalf.open(config, found, rank, RANKS, self.shared)
        while self.half.health().pinning:
            time.sleep(0.001)
        self.pin_s = time.perf_counter() - start
        self.number = 0

    def opened(self) -> Any:
        health = self.half.health()
        assert not health.refused, health.refused
        return {"handle": self.shared.handle, "copies": health.copies, "pin_s": self.pin_s}

    def save(self) -> Any:
        return self._copy(Tier.HBM, Tier.HOST)

    def load(self) -> Any:
        return self._copy(Tier.HOST, Tier.HBM)

    def spoil(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(-1.0)
        if self.tensors[0].device.type == "cuda":
            torch.cuda.synchronize(self.tensors[0].device)

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self.tensors:
            found.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def _copy(self, src: Tier, dst: Tier) -> Any:
        self.number += 1
        keys, slots = tuple(chain(self.blocks)), tuple(range(self.blocks))
        reverse = slots[::-1]
        from_slots, into = (slots, reverse) if dst == Tier.HOST else (reverse, slots)
        command = Transfer(self.number, keys, src, from_slots, dst, into, 0, keys)
        start = time.perf_counter()
        self.half.begin(Orders(before=(command,)))
        self.half.end()
        while (report := self.half.report()) is None or not report.acks[self.half.hello.rank]:
            assert time.perf_counter() - start < PATIENCE_S, "the copy does not end"
        (ack,) = report.acks[self.half.hello.rank]
        assert ack.ok, ack
        return {"nbytes": ack.nbytes, "seconds": time.perf_counter() - start}


def main(rank: str, device: str, blocks: str, host: str, *handle: str) -> None:
    """Open a rank, and execute one command per line of the input."""
    found = _Rank(
        int(rank), device, int(blocks), json.loads(host), Handle(*map(int, handle)) if handle else None
    )
    _say(found.opened())
    for line in sys.stdin:
        if line.strip() == "close":
            break
        _say(getattr(found, line.strip())())
    found.half.close()


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
