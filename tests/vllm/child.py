"""One life of a real engine, in a process of its own: ``python -m tests.vllm.child CASE RESULT``.

CASE is a JSON file ``{"engine": {...}, "transfer": {...} or null, "steps": [[name, {...}], ...]}``: the arguments of
vLLM's ``LLM``, its ``KVTransferConfig``, and what to do, in order. RESULT gets ``{"steps": [...]}``, one entry a step.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # vLLM kills an engine that has not ended after 5 s if it is not told otherwise
WANTED = ("prefix_cache", "preemptions", "kv_offload", "tierstore", "cache_hit")

Prompt = str | list[int] | dict[str, Any]
"""A text, its token ids, or what vLLM takes as a prompt."""


class Life:
    """An engine and what it is told. Every public method is a step; its result is plain data."""

    def __init__(self, engine: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        self._llm = LLM(disable_log_stats=False, enforce_eager=True, **engine, **more)
        self._engine = self._llm.llm_engine
        self._last_id = 0

    def ask(self, prompts: list[Prompt], tokens: int, together: bool = False) -> list[dict[str, Any]]:
        """Answers in the order of the prompts, asked one after the other or all at once."""
        if together:
            return self._answers(prompts, tokens)
        return [answer for prompt in prompts for answer in self._answers([prompt], tokens)]

    def reset(self) -> bool:
        """Empty the engine's own prefix cache; True if it did."""
        return bool(self._llm.reset_prefix_cache())

    def sleep(self) -> None:
        """Sleep and wake up again; on the CPU the memory stays, all else happens."""
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def settle(self, tokens: int = 16) -> None:
        """Answer a short prompt that nobody knows: so many steps for what goes on behind requests."""
        self._answers([[5, 4, 3]], tokens)

    def storm(
        self, prompts: list[Prompt], requests: int, tokens: int, seed: int, most: int
    ) -> dict[str, Any]:
        """``requests`` requests, ``most`` of them at a time; about half are aborted, each after a random number of
        steps. What the others answered, by the prompt's number.
        """
        dice = random.Random(seed)
        running: dict[str, tuple[int, int]] = {}
        answered: list[tuple[int, list[int]]] = []
        started = aborted = steps = 0
        while started < requests or running:
            while started < requests and len(running) < most:
                number = dice.randrange(len(prompts))
                life = dice.randrange(1, 2 * tokens) if dice.random() < 0.5 else 1 << 30
                running[self._begin(prompts[number], tokens)] = (number, steps + life)
                started += 1
            for output in self._engine.step():
                if output.finished and output.request_id in running:
                    number, _ = running.pop(output.request_id)
                    answered.append((number, list(output.outputs[0].token_ids)))
            steps += 1
            gone = [name for name, (_, end) in running.items() if end <= steps]
            if gone:
                self._engine.abort_request(gone)
                aborted += len(gone)
                for name in gone:
                    del running[name]
        return {"answered": answered, "aborted": aborted, "steps": steps}

    def counts(self) -> dict[str, float]:
        """Counters and gauges that concern caches, by name, and by name and labels where they have some."""
        found: dict[str, float] = defaultdict(float)
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is None or not any(part in metric.name for part in WANTED):
                continue
            found[metric.name] += value
            labels = {k: v for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine")}
            if labels:
                found[f"{metric.name}{json.dumps(labels)}"] += value
        return dict(found)

    def blocks(self) -> dict[str, int]:
        """Blocks of the engine's pool that nobody uses, and all that can be used. Needs ``in_process``."""
        pool = self._core().scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "usable": pool.num_gpu_blocks - 1}

    def check(self) -> str:
        """Ask both halves of the connector for their invariants. Needs ``in_process``."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._core().scheduler.connector.check()
        get_kv_transfer_group().check()
        return "clean"

    def beside(self, case: dict[str, Any], folder: str) -> dict[str, Any]:
        """Another life beside this one: its exit code and the end of what it said. ``folder`` is made for it."""
        home = Path(folder)
        home.mkdir()
        (home / "case.json").write_text(json.dumps(case))
        command = [
            sys.executable,
            "-m",
            "tests.vllm.child",
            str(home / "case.json"),
            str(home / "result.json"),
        ]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300
        )
        return {"code": ended.returncode, "said": ended.stdout[-20_000:]}

    def files(self, folder: str) -> dict[str, str]:
        """Digest of every file in a folder."""
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }

    def fail_loads(self, every: int) -> None:
        """From now on every so-manyth load of ``FaultyConnector`` fails, 0: none. Needs ``in_process``."""
        from tests.vllm import faulty

        faulty.FAILS_EVERY = every

    def kill(self) -> None:
        """End as a crash does. Needs ``in_process``."""
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        """Shut the engine down as a server does."""
        self._engine.engine_core.shutdown(timeout=PATIENCE_S)

    def _begin(self, prompt: Prompt, tokens: int) -> str:
        from vllm import SamplingParams

        self._last_id += 1
        name = f"r{self._last_id}"
        self._engine.add_request(
            name,
            {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt,
            SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=isinstance(prompt, str)
            ),
        )
        return name

    def _answers(self, prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
        began = time.monotonic()
        names = [self._begin(prompt, tokens) for prompt in prompts]
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        while len(done) < len(names):
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.monotonic() - began)
                if output.finished:
                    done[output.request_id] = output
        return [
            {
                "tokens": list(done[name].outputs[0].token_ids),
                "cached": done[name].num_cached_tokens,
                "prompt": len(done[name].prompt_token_ids),
                "first_token_s": first[name],
                "reason": done[name].outputs[0].finish_reason,
            }
            for name in names
        ]

    def _core(self) -> Any:
        return self._engine.engine_core.engine_core


def main(case_file: str, result_file: str) -> None:
    """Play one case. The result is written step by step, so that an engine that dies leaves what it had answered."""
    case = json.loads(Path(case_file).read_text())
    life = Life(case["engine"], case.get("transfer"))
    results: list[Any] = []
    for name, arguments in [*case["steps"], ["end", {}]]:
        results.append(getattr(life, name)(**arguments))
        Path(result_file).write_text(json.dumps({"steps": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
