"""Runs a real engine in a separate process: ``python -m tests.vllm.child CASE RESULT``.

CASE is a JSON file ``{"engine": {...}, "transfer": {...} or null, "steps": [[name, {...}], ...]}``. It contains
the arguments of vLLM's ``LLM``, those of ``KVTransferConfig``, and the steps to execute in order. A step is a method of
``Life`` and its arguments. The program writes ``{"steps": [...]}`` to the file RESULT, with one result per step. With
``"prefill": {"engine": ..., "transfer": ...}``, a second engine prefills prompts and sends their KV to the first one
over NIXL. With ``"first": MODULE``, this module is imported before the engine starts.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # by default, vLLM kills an engine that does not end within 5 s
WANTED = ("prefix_cache", "preemptions", "kv_offload", "tierstore", "cache_hit")

Prompt = str | list[int] | dict[str, Any]
"""A text, token IDs, or a mapping that vLLM accepts as a prompt."""


class Life:
    """An engine. Each public method is a step of a case, and returns data that JSON can represent."""

    def __init__(self, engine: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        self._llm = LLM(disable_log_stats=False, enforce_eager=True, **engine, **more)
        self._engine = self._llm.llm_engine
        self._last_id = 0
        self.prefiller: Life | None = None

    def ask(self, prompts: list[Prompt], tokens: int, together: bool = False) -> list[dict[str, Any]]:
        """Answer prompts, one after the other or all ``together``. Return the answers in the order of the prompts."""
        if together:
            return self._answers(prompts, tokens)
        return [answer for prompt in prompts for answer in self._answers([prompt], tokens)]

    def remote(self, prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
        """Answer prompts after the second engine has prefilled them.

        ``prefiller_cached`` in the result is the number of tokens that the second engine found in its cache.
        """
        assert self.prefiller is not None
        answers = []
        for prompt in prompts:
            name = self.prefiller._begin(
                prompt, 1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
            )
            output = self.prefiller._finished([name])[name]
            own = self._begin(prompt, tokens, extra_args={"kv_transfer_params": output.kv_transfer_params})
            done = self._finished([own])[own]
            answers.append(
                {
                    "tokens": list(done.outputs[0].token_ids),
                    "cached": done.num_cached_tokens,
                    "prefiller_cached": output.num_cached_tokens,
                }
            )
        return answers

    def reset_both(self) -> bool:
        """Clear the prefix caches of both engines. Return whether both calls succeeded."""
        assert self.prefiller is not None
        return self.prefiller.reset() and self.reset()

    def prompt_logprobs(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Return the log-probabilities of each prompt's tokens except the first, and the number of cached tokens."""
        found = []
        for prompt in prompts:
            name = self._begin(prompt, 1, prompt_logprobs=1)
            output = self._finished([name])[name]
            values = [
                place[token].logprob
                for token, place in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
            found.append({"logprobs": values, "cached": output.num_cached_tokens})
        return found

    def first_tokens(self, prompts: list[Prompt], top: int) -> list[dict[str, Any]]:
        """Return the log-probabilities of the ``top`` likeliest first tokens of each answer, by token.

        The result also contains the number of cached tokens.
        """
        found = []
        for prompt in prompts:
            name = self._begin(prompt, 1, logprobs=top)
            output = self._finished([name])[name]
            (likely,) = output.outputs[0].logprobs
            values = {token: each.logprob for token, each in likely.items()}
            found.append({"logprobs": values, "cached": output.num_cached_tokens})
        return found

    def talk(self, turns: list[list[int]], tokens: int, forget: bool) -> list[dict[str, Any]]:
        """Hold a conversation: send each turn together with all previous turns and answers.

        If ``forget``, clear the engine's own prefix cache before each turn.
        """
        said: list[int] = []
        answers: list[dict[str, Any]] = []
        for turn in turns:
            said += turn
            assert not forget or self.reset()
            answers += self._answers([said], tokens)
            said += answers[-1]["tokens"]
        return answers

    def reset(self) -> bool:
        """Clear the engine's own prefix cache. Return whether this succeeded."""
        return bool(self._llm.reset_prefix_cache())

    def sleep(self) -> None:
        """Put the engine to sleep and wake it up. On the CPU, vLLM performs both but releases no memory."""
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def interrupted(
        self, prompts: list[Prompt], tokens: int, pauses: list[str], every: int
    ) -> list[dict[str, Any]]:
        """Answer prompts together. Whenever ``every`` engine steps have passed, interrupt them with the next pause.

        The pause "reset" preempts all requests and clears the engine's own prefix cache. "sleep 1" and "sleep 2" do
        the same, and then put the engine to sleep at level 1 or 2. On the CPU, an engine keeps its memory while it
        sleeps, so these two pauses also overwrite the KV memory. Needs ``in_process``.

        vLLM cannot reset its cache while a waiting request owns blocks, for example for a load. The pause is then
        delayed.
        """
        names = [self._begin(prompt, tokens) for prompt in prompts]
        done: dict[str, Any] = {}
        steps, left = 0, list(pauses)
        while len(done) < len(names):
            for output in self._engine.step():
                if output.finished:
                    done[output.request_id] = output
            steps += 1
            if left and steps >= every and not self._hold_while_waiting():
                self._pause(left.pop(0))
                steps = 0
        assert not left, f"the requests had ended before {left}"
        return [
            {"tokens": list(done[n].outputs[0].token_ids), "cached": done[n].num_cached_tokens} for n in names
        ]

    def _statuses(self, names: Collection[str]) -> list[str]:
        """Return the vLLM status of each named request, or an empty list if the scheduler is in another process."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        ids = {
            each for name in names for each in self._engine.output_processor.external_req_ids.get(name, ())
        }
        requests = [] if core is None else core.scheduler.requests.values()
        return [request.status.name for request in requests if request.request_id in ids]

    def _hold_while_waiting(self) -> bool:
        """Return whether a request that is not running has blocks."""
        scheduler = self._core().scheduler
        blocks, runs = scheduler.kv_cache_manager.get_block_ids, {id(each) for each in scheduler.running}
        return any(any(blocks(r.request_id)) for r in scheduler.requests.values() if id(r) not in runs)

    def _pause(self, how: str) -> None:
        if how == "reset":
            assert self._llm.reset_prefix_cache(reset_running_requests=True)
            return
        name, level = how.split()
        assert name == "sleep"
        self._llm.sleep(level=int(level), mode="keep")
        self._on_workers(_overwrite_kv)
        self._llm.wake_up()

    def settle(self, tokens: int = 16) -> None:
        """Generate ``tokens`` tokens from a short, uncached prompt, so that background work can proceed."""
        self._answers([[5, 4, 3]], tokens)

    def rest(self) -> None:
        """Run engine steps until the connector has no work in flight, as a server does. Needs ``in_process``."""
        while self._core().scheduler.connector.has_pending_push_work():
            self._engine.step()

    def storm(
        self, prompts: list[Prompt], requests: int, tokens: int, seed: int, most: int
    ) -> dict[str, Any]:
        """Send ``requests`` requests, at most ``most`` at a time, and abort about half of them after a random time.

        The result contains the answer to each request that was not aborted, with the index of its prompt. It also
        contains the number of aborted requests per vLLM status, unless the scheduler is in another process.
        """
        dice = random.Random(seed)
        running: dict[str, tuple[int, int]] = {}
        answered: list[tuple[int, list[int]]] = []
        statuses: Counter[str] = Counter()
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
                statuses.update(self._statuses(gone))
                self._engine.abort_request(gone)
                aborted += len(gone)
                for name in gone:
                    del running[name]
        return {"answered": answered, "aborted": aborted, "statuses": statuses, "steps": steps}

    def counts(self) -> dict[str, float]:
        """Return the values of counters and gauges about caches: the total per name, and one per name and labels."""
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
        """Return how many blocks of the engine's pool are free, and how many are usable. Needs ``in_process``."""
        pool = self._core().scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "usable": pool.num_gpu_blocks - 1}

    def held(self) -> dict[str, int]:
        """Return how many objects of each kind the connector and vLLM hold for requests. Needs ``in_process``.

        When no requests and no copies are in flight, a number above 0 means that something leaked.
        """
        scheduler = self._core().scheduler
        half, tables = scheduler.connector._scheduler, scheduler.connector._steps._tables
        tiers, demand = half._tiers, half._demand
        tiers.take_back()
        stats, pool = half.stats(), scheduler.kv_cache_manager.block_pool
        return {
            "requests in vLLM": len(scheduler.requests),
            "blocks with an owner": sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null),
            "requests": len(half._known) + len(half._early) + len(half._granted) + len(tables),
            "loads": len(tiers.loads._loads) + len(tiers.loads._loaded) + len(tiers.loads._failed),
            "blocks that loads write": len(tiers.loads.into),
            "blocks that copies read": len(tiers.stores.busy),
            "pages to put": len(tiers.stores._collected),
            "leases": stats["leases"],
            "pinned pages": sum(tier["pinned"] for tier in stats["tiers"].values()),
            "pages in flight": sum(stats["in_flight"].values()),
            "commands": sum(self._on_workers(_commands)) + int(tiers.ranks.waiting),
            "prefetched requests": len(tiers.disk_prefetch._queue) if tiers.disk_prefetch else 0,
            "waiting requests": len(demand._engine | demand._reads | demand._moves),
        }

    def memory(self) -> int:
        """Return unused memory to the operating system. Return the process's resident memory in bytes."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def check(self) -> str:
        """Check the invariants of both halves of the connector. Needs ``in_process``."""
        self._core().scheduler.connector.check()
        self._on_workers(_check)
        return "clean"

    def beside(self, case: dict[str, Any], folder: str) -> dict[str, Any]:
        """While this engine is open, run another one in the new directory ``folder``.

        Return its exit code and the end of its output.
        """
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
        """Return the digest of every file below a directory, by path."""
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }

    def fail_loads(self, every: int) -> None:
        """Make one in ``every`` loads of ``FaultyConnector`` fail from now on. 0 means none. Needs ``in_process``."""
        from tests.vllm import faulty

        faulty.FAILS_EVERY = every

    def spoil_states(self) -> None:
        """Make ``FaultyConnector`` write garbage over every state that it loads from now on. Needs ``in_process``."""
        from tests.vllm import faulty

        faulty.SPOILS = True

    def kill(self) -> None:
        """Kill this process, as in a crash. Needs ``in_process``."""
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        """Shut the engine down as a server does."""
        if self.prefiller is not None:
            self.prefiller.end()
        self._engine.engine_core.shutdown(timeout=PATIENCE_S)

    def _begin(self, prompt: Prompt, tokens: int, **sampling: Any) -> str:
        from vllm import SamplingParams

        self._last_id += 1
        name = f"r{self._last_id}"
        self._engine.add_request(
            name,
            {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt,
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=isinstance(prompt, str),
                **sampling,
            ),
        )
        return name

    def _answers(self, prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
        began = time.monotonic()
        names = [self._begin(prompt, tokens) for prompt in prompts]
        first: dict[str, float] = {}
        done = self._finished(names, lambda name: first.setdefault(name, time.monotonic() - began))
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

    def _finished(
        self, names: list[str], began: Callable[[str], object] = lambda name: None
    ) -> dict[str, Any]:
        """Run engine steps until these requests have finished, and return the last output of each.

        ``began`` is called with a request's name whenever one of its outputs contains tokens.
        """
        done: dict[str, Any] = {}
        while len(done) < len(names):
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    began(output.request_id)
                if output.finished:
                    done[output.request_id] = output
        return done

    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def _on_workers(self, work: Callable[[Any], Any]) -> list[Any]:
        """Call ``work`` with each worker of vLLM, in the worker's process. Return the results."""
        return list(self._llm.collective_rpc(work))


def _check(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().check()


def _commands(worker: Any) -> int:
    """Return how many commands the worker half has not completed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return len(get_kv_transfer_group()._worker._commands._open)


def _overwrite_kv(worker: Any) -> None:
    """Overwrite the worker's whole KV memory."""
    import torch

    for found in getattr(worker, "worker", worker).model_runner.kv_caches:
        for tensor in found if isinstance(found, list | tuple) else [found]:
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(99)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main(case_file: str, result_file: str) -> None:
    """Run one case. The result is written after every step, so that it is kept if the engine crashes later."""
    case = json.loads(Path(case_file).read_text())
    if "first" in case:
        importlib.import_module(case["first"])
    other = case.get("prefill")
    prefiller = None
    if other is not None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
        prefiller = Life(other["engine"], other["transfer"])
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
    life = Life(case["engine"], case.get("transfer"))
    life.prefiller = prefiller
    results: list[Any] = []
    for name, arguments in [*case["steps"], ["end", {}]]:
        results.append(getattr(life, name)(**arguments))
        Path(result_file).write_text(json.dumps({"steps": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
