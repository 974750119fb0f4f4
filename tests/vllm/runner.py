"""Starts lives of real engines, one after the other, and keeps what each of them said."""

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


def blocks() -> Step:
    return "blocks", {}


def check() -> Step:
    return "check", {}


def fail_loads(every: int) -> Step:
    return "fail_loads", {"every": every}


def kill() -> Step:
    """The last one of a life: it ends as a crash does."""
    return "kill", {}


def beside(case: Mapping[str, Any], folder: Path) -> Step:
    return "beside", {"case": dict(case), "folder": str(folder)}


def connector(config: object, load: str = "always", **more: object) -> dict[str, Any]:
    """The transfer configuration that turns TierStore on; ``config``: a path or a mapping.

    ``load``: by itself what is found is loaded however slow this machine's disk is, since hits are what is counted.
    """
    line: dict[str, Any] = {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": config, "load": load},
    }
    return line | more


def tiers(chunks: int, chunk_nbytes: int, secondary: Mapping[str, object]) -> dict[str, Any]:
    """The transfer configuration of vLLM's own tiers: host memory of so many chunks, and one tier below."""
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
    """``python``: one that has vLLM. ``folder`` keeps each life's case, result and log, by number.

    ``always``: arguments of every engine.
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
        in_process: bool = False,
        **engine: object,
    ) -> list[Any]:
        """Start an engine, play ``steps``, end it; the results of the steps, in their order.

        ``in_process``: scheduler and worker in one process, as on one card; else each has its own. ``engine`` goes to
        vLLM's ``LLM``. AssertionError with the end of the log if it does not end well.
        """
        self.lives += 1
        home = self.folder / f"life-{self.lives}"
        home.mkdir(parents=True)
        case = self.case(steps, transfer=transfer, **engine)
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
        """A case as ``tests.vllm.child`` takes it, with defaults that fit a small machine."""
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
        """What the last life said."""
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
