"""Runs real engines one after the other (see ``child``), and keeps their output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 900.0
_TAIL = 6_000

Step = tuple[str, dict[str, Any]]
Prompt = str | list[int] | dict[str, Any]


def ask(prompts: Sequence[Prompt], tokens: int = 8, *, together: bool = False) -> Step:
    return "ask", {"prompts": list(prompts), "tokens": tokens, "together": together}


def remote(prompts: Sequence[Prompt], tokens: int = 8) -> Step:
    return "remote", {"prompts": list(prompts), "tokens": tokens}


def reset_both() -> Step:
    return "reset_both", {}


def prompt_logprobs(prompts: Sequence[list[int]]) -> Step:
    return "prompt_logprobs", {"prompts": list(prompts)}


def first_tokens(prompts: Sequence[Prompt], top: int = 20) -> Step:
    return "first_tokens", {"prompts": list(prompts), "top": top}


def talk(turns: Sequence[list[int]], tokens: int, *, forget: bool) -> Step:
    return "talk", {"turns": list(turns), "tokens": tokens, "forget": forget}


def reset() -> Step:
    return "reset", {}


def sleep() -> Step:
    return "sleep", {}


def counts() -> Step:
    return "counts", {}


def storm(prompts: Sequence[Prompt], *, requests: int, tokens: int, seed: int, most: int) -> Step:
    return "storm", {
        "prompts": list(prompts),
        "requests": requests,
        "tokens": tokens,
        "seed": seed,
        "most": most,
    }


def settle() -> Step:
    return "settle", {}


def rest() -> Step:
    return "rest", {}


def blocks() -> Step:
    return "blocks", {}


def held() -> Step:
    return "held", {}


def memory() -> Step:
    return "memory", {}


def interrupted(prompts: Sequence[Prompt], tokens: int, pauses: Sequence[str], every: int) -> Step:
    return "interrupted", {"prompts": list(prompts), "tokens": tokens, "pauses": list(pauses), "every": every}


def check() -> Step:
    return "check", {}


def fail_loads(every: int) -> Step:
    return "fail_loads", {"every": every}


def spoil_states() -> Step:
    return "spoil_states", {}


def files(folder: Path) -> Step:
    return "files", {"folder": str(folder)}


def kill() -> Step:
    """Return the step that kills the engine's process, as a crash would. It must be the last step."""
    return "kill", {}


def beside(case: Mapping[str, Any], folder: Path) -> Step:
    return "beside", {"case": dict(case), "folder": str(folder)}


def connector(config: object, load: str = "always", **more: object) -> dict[str, Any]:
    """Return the transfer configuration that enables TierStore. ``config`` is a path or a mapping.

    By default, all pages found are loaded, even if the disk is slow, because tests count hits.
    """
    line: dict[str, Any] = {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": config, "load": load},
    }
    return line | more


def several(*lines: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transfer configuration of ``MultiConnector`` with these connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [dict(line) for line in lines]},
    }


def nixl(role: str) -> dict[str, Any]:
    """Return the transfer configuration of NIXL, vLLM's connector between a prefill engine and a decode engine."""
    return {"kv_connector": "NixlConnector", "kv_role": role}


def tiers(chunks: int, chunk_nbytes: int, secondary: Mapping[str, object]) -> dict[str, Any]:
    """Return the transfer configuration of vLLM's own tiers: host memory for ``chunks`` chunks, and a tier below it.

    ``secondary`` is the configuration of the tier below.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.cpu_tier",
            "cpu_bytes_to_use": chunks * chunk_nbytes,
            "secondary_tiers": [dict(secondary)],
        },
    }


@dataclass
class Engines:
    """Starts engines of one model.

    ``python`` is an interpreter that has vLLM. ``folder`` receives the case, the result and the log of each engine.
    ``always`` contains arguments that every engine gets.
    """

    python: Path
    model: Path
    folder: Path
    always: Mapping[str, object] = field(default_factory=dict)
    lives: int = field(default=0)

    def life(
        self,
        steps: Sequence[Step],
        *,
        transfer: Mapping[str, Any] | None = None,
        prefill: Mapping[str, Any] | None = None,
        in_process: bool = False,
        first: str | None = None,
        **engine: object,
    ) -> list[Any]:
        """Start an engine, execute ``steps``, and shut it down. Return the results of the steps, in order.

        Args:
            steps: Methods of ``child.Life`` with their arguments.
            transfer: The transfer configuration, or None.
            prefill: The transfer configuration of a second engine, for the step ``remote``.
            in_process: Whether the process that executes the steps also runs the scheduler and, if there is only one
                worker, the worker.
            first: A module to import before the engine starts, or None.
            engine: Arguments of vLLM's ``LLM``.

        Raises:
            AssertionError: The engine failed. The message contains the end of the log.
        """
        self.lives += 1
        home = self.folder / f"life-{self.lives}"
        home.mkdir(parents=True)
        case = self.case(steps, transfer=transfer, **engine)
        if prefill is not None:
            case["prefill"] = {"engine": case["engine"], "transfer": dict(prefill)}
        if first is not None:
            case["first"] = first
        (home / "case.json").write_text(json.dumps(case))
        with (home / "log.txt").open("wb") as log:
            ended = subprocess.run(
                [self.python, "-m", "tests.vllm.child", home / "case.json", home / "result.json"],
                env=_environment(in_process),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
                check=False,
            )
        expected = -signal.SIGKILL if steps[-1][0] == "kill" else 0
        assert ended.returncode == expected, f"exit code {ended.returncode}; {self.log()[-_TAIL:]}"
        results: list[Any] = json.loads((home / "result.json").read_text())["steps"]
        return results[: len(steps)]

    def case(
        self, steps: Sequence[Step], *, transfer: Mapping[str, Any] | None = None, **engine: object
    ) -> dict[str, Any]:
        """Return a case for ``tests.vllm.child``, with default arguments that suit a small machine."""
        defaults: dict[str, object] = {
            "model": str(self.model),
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 128,
            "enable_prefix_caching": True,
        }
        return {
            "engine": defaults | dict(self.always) | engine,
            "transfer": transfer,
            "steps": [list(step) for step in steps],
        }

    def log(self) -> str:
        """Return the log of the last engine."""
        return (self.folder / f"life-{self.lives}" / "log.txt").read_text(errors="replace")


def _environment(in_process: bool) -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
