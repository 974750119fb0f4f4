"""Checks the connector in real vLLM on two GPUs with context parallelism.

Run ``python -m tests.gpu.vllm_context_parallel``. Each case is a small random model and a division over two ranks. The
cases run at the same time, each in a process of its own. In a case, three engines run one after the other: plain vLLM,
vLLM with the store, and after a restart vLLM with the files of that store. Each engine answers the same prompts.
Tokens and the highest log-probabilities of prompts that come from host memory or from disk must be equal, bit for bit,
to those of prompts that come from vLLM's own prefix cache. Those of computed prompts may differ by rounding.

The last line of output is a JSON object with a row per case. The exit code is 1 if a case failed. With ``--device cpu
--cases llama-tp``, the program itself can be tried on a CPU. vLLM has no context parallelism there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-dcp": ("llama", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "llama-dcp-pieces": (
        "llama",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16},
    ),
    "mla-dcp": ("mla", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "mla-tp": ("mla", {"tensor_parallel_size": 2}),
    "mla-pcp": ("mla", {"prefill_context_parallel_size": 2}),
    "llama-tp": ("llama", {"tensor_parallel_size": 2}),
}
DEFAULT = "llama-dcp,mla-dcp,mla-tp"
"""Cases that run by default. vLLM has prefill context parallelism only for some models and settings."""

VOCABULARY = 2048
ANSWER, TOP = 12, 8
LIFE_S = 100.0
Answer = dict[str, Any]

SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
"""Settings with which vLLM, NCCL and torch use no NVLink multicast. It can disturb other users of the machine."""


def save_model(kind: str, folder: Path, dtype: str) -> None:
    """Write a small random model. Its weights are large, so that different tokens have clearly different logits."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        # Decode context parallelism needs more tensor parallel ranks than KV heads.
        model = LlamaForCausalLM(
            LlamaConfig(**shared, num_attention_heads=8, num_key_value_heads=1, head_dim=64)
        )
    else:
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(
                **shared,
                num_attention_heads=16,
                num_key_value_heads=16,
                first_k_dense_replace=3,
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Return prompts of 400 to 2,300 tokens. Three of them share their first 512 tokens."""

    def tokens(seed: int, count: int) -> list[int]:
        dice = random.Random(seed)
        return [dice.randrange(10, VOCABULARY) for _ in range(count)]

    shared = tokens(99, 512)
    return [
        shared + tokens(0, 77),
        shared + tokens(1, 600),
        shared + tokens(2, 1111),
        tokens(3, 400),
        tokens(4, 2300),
    ]


class Life:
    """An engine of vLLM with its scheduler in this process and two workers in processes of their own."""

    def __init__(self, model: Path, division: dict[str, int], disk: Path | None, options: argparse.Namespace):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more: dict[str, Any] = dict(division)
        if disk is not None:
            tiers = {"host": {"capacity": "512MiB"}, "nvme": {"path": str(disk), "capacity": "1GiB"}}
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="TierStoreConnector",
                kv_connector_module_path="tierstore.adapters.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"config": tiers, "load": "always"},
            )
        if options.device == "cpu":
            more |= {"num_gpu_blocks_override": 400, "block_size": 32}
        else:
            more |= {"kv_cache_memory_bytes": 1 << 29, "gpu_memory_utilization": 0.05}
        if options.backend:
            more["attention_backend"] = options.backend
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_custom_all_reduce=True,
            disable_log_stats=False,
            seed=0,
            **more,
        )
        self._dice = random.Random(os.getpid())

    def ask(self, asked: Sequence[list[int]]) -> list[Answer]:
        """Answer the prompts one after the other."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=TOP
        )
        found = []
        for prompt in asked:
            given: Any = [{"prompt_token_ids": prompt}]
            output = self._llm.generate(given, wanted, use_tqdm=False)[0]
            places = output.outputs[0].logprobs or []
            found.append(
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "logprobs": [{str(t): each.logprob for t, each in place.items()} for place in places],
                }
            )
        return found

    def settle(self, seconds: float) -> None:
        """Answer short new prompts, so that the engine advances transfers that continue after a request has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask([[self._dice.randrange(10, VOCABULARY) for _ in range(20)]])

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        deadline = time.monotonic() + 10
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM did not reset its prefix cache within 10 s")
            self.settle(0.1)

    def end(self) -> None:
        """Shut the engine down as a server does."""
        self._llm.llm_engine.engine_core.shutdown(timeout=60.0)


def live(name: str, model: Path, disk: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine: "plain", "store" or "restart". Return its answers by phase."""
    began = time.monotonic()
    _, division = CASES[options.case]
    engine = Life(model, division, None if name == "plain" else disk, options)
    found: dict[str, Any] = {"init_s": round(time.monotonic() - began, 1)}
    asked = prompts()
    if name != "restart":
        found["cold"] = engine.ask(asked)
        found["hit"] = engine.ask(asked)
        engine.settle(0.5)
        engine.forget()
    found["restored"] = engine.ask(asked)
    if name == "store":
        engine.settle(1.0)  # the disk gets its pages
    engine.end()
    return found | {"s": round(time.monotonic() - began, 1)}


def _in_child(name: str, model: Path, disk: Path, options: argparse.Namespace, result: Path) -> None:
    with (Path(options.logs) / f"{options.case}.{name}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        result.write_text(json.dumps(live(name, model, disk, options)))


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    """Run the three engines of a case. Return a row that says which answers were equal."""
    import vllm
    from vllm import LLM  # noqa: F401 - imported once, before the engines are forked

    kind, division = CASES[options.case]
    row: dict[str, Any] = {"case": options.case, "vllm": vllm.__version__, **division}
    home = Path(tempfile.mkdtemp(prefix=f"tierstore-{options.case}-", dir=options.folder or None))
    save_model(kind, home / "model", "float32" if options.device == "cpu" else "bfloat16")
    lives: dict[str, dict[str, Any]] = {}
    for name in ("plain", "store", "restart"):
        result = home / f"{name}.json"
        child = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(name, home / "model", home / "disk", options, result)
        )
        child.start()
        child.join(LIFE_S)
        if child.is_alive():
            child.kill()
        if child.exitcode != 0 or not result.exists():
            log = (Path(options.logs) / f"{options.case}.{name}.log").read_text(errors="replace")
            return {**row, "error": f"{name} ended with {child.exitcode}", "log": log[-1500:]}
        lives[name] = json.loads(result.read_text())
    return row | compared(lives)


def compared(lives: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many restored answers are equal to those of vLLM's own prefix cache, and how far others differ."""
    plain, store, restart = lives["plain"], lives["store"], lives["restart"]
    row: dict[str, Any] = {
        "s": {name: life["s"] for name, life in lives.items()},
        "init_s": {name: life["init_s"] for name, life in lives.items()},
        "cached": {
            "own cache": [answer["cached"] for answer in plain["hit"]],
            "host": [answer["cached"] for answer in store["restored"]],
            "restart": [answer["cached"] for answer in restart["restored"]],
        },
        "noise of plain vLLM": worst(plain["cold"], [*plain["hit"], *plain["restored"]]),
    }
    for name, answers in (
        ("store, computed", store["cold"]),
        ("host", store["restored"]),
        ("restart", restart["restored"]),
    ):
        row[name] = {
            "equal to plain, computed": equal(plain["cold"], answers),
            "equal to plain, own cache": equal(plain["hit"], answers),
            "equal to store, own cache": equal(store["hit"], answers),
            "differs from plain, computed, by": worst(plain["cold"], answers),
        }
    whole = f"{len(plain['hit'])}/{len(plain['hit'])}"
    row["ok"] = all(
        row[name]["equal to store, own cache"] == whole
        and row["cached"][name] == row["cached"]["own cache"]
        and min(row["cached"][name]) > 0
        for name in ("host", "restart")
    )
    return row


def equal(one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """Return how many answers have the same tokens and log-probabilities, bit for bit."""
    pairs = list(zip(one, other, strict=True))
    same = sum(a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"] for a, b in pairs)
    return f"{same}/{len(pairs)}"


def worst(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Return the largest difference in log-probability of the first token.

    ``other`` may repeat the prompts of ``one``.
    """
    found = 0.0
    for number, answer in enumerate(other):
        mine, theirs = one[number % len(one)]["logprobs"][0], answer["logprobs"][0]
        found = max(found, *(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()))
    return round(found, 5)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of a case."""
    added = SAFE | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # otherwise vLLM 0.26 hashes blocks differently in every process
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    if options.device == "cpu":
        added |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return os.environ | added


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases at the same time. Return their rows. A case that failed has an ``error``."""
    began = time.monotonic()
    running = {}
    for case in options.cases.split(","):
        command = [sys.executable, "-m", "tests.gpu.vllm_context_parallel", *sys.argv[1:], "--case", case]
        command += ["--logs", options.logs]
        with (Path(options.logs) / f"{case}.log").open("wb") as log:
            running[case] = subprocess.Popen(
                command, cwd=ROOT, env=environment(options), stdout=subprocess.PIPE, stderr=log, text=True
            )
    rows = []
    for case, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(1.0, options.budget - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            rows.append({"case": case, "error": f"it had not ended after {options.budget:.0f} s"})
            continue
        last = said.splitlines()[-1:] or [""]
        if last[0].startswith("{"):
            rows.append(json.loads(last[0]))
        else:
            log_text = (Path(options.logs) / f"{case}.log").read_text(errors="replace")
            rows.append({"case": case, "error": f"exit code {process.returncode}", "log": log_text[-1500:]})
    return rows


def main() -> None:
    """Run all cases and print a report, or run the case ``--case`` in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=DEFAULT, help=f"separated by commas: {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--backend", default="", help="vLLM's attention backend; default: vLLM's own choice")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all cases")
    parser.add_argument(
        "--folder", default="", help="folder for models and the disk tier; default: temporary"
    )
    parser.add_argument("--logs", default="", help="folder for logs; default: a temporary one")
    parser.add_argument("--case", default="", help="run only this case, in this process")
    options = parser.parse_args()
    options.logs = options.logs or tempfile.mkdtemp(prefix="tierstore-logs-")
    Path(options.logs).mkdir(parents=True, exist_ok=True)
    if options.case:
        try:
            row = run_case(options)
        except Exception as error:  # noqa: BLE001 - top level of a process: report and end
            traceback.print_exc()
            row = {"case": options.case, "error": repr(error)[:500]}
        sys.stdout.write(json.dumps(row) + "\n")
        return
    began = time.monotonic()
    rows = run_all(options)
    for row in rows:
        sys.stderr.write(json.dumps(row) + "\n")
    ok = all(row.get("ok", False) for row in rows)
    sys.stdout.write(
        json.dumps({"ok": ok, "s": round(time.monotonic() - began, 1), "logs": options.logs, "rows": rows})
        + "\n"
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
