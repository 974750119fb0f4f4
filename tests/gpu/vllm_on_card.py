"""Compares the store in real vLLM with vLLM's own connectors for host memory: ``python -m tests.gpu.vllm_on_card``.

Each variant, called a life, runs an engine in its own process. The lives run one after the other. The model is a Llama
with random weights, and the prompts are random tokens. One token is requested, so that the time of ``generate`` is the
time to first token. The last line of output is a JSON object with a row per life, the link's rate, and the ratios. A
life that failed has an ``error``. With ``--shape tiny --device cpu`` it runs on a CPU in two minutes, but vLLM's own
connectors fail there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 512,
        "torch_dtype": "float32",
    },
}
NUMBER_NBYTES = {"bfloat16": 2, "float32": 4}
QUESTION = 64
"""Number of random tokens that are added to a prompt, different each time."""

LIVES = ("plain", "host", "disk", "restarted", "OffloadingConnector", "SimpleCPUOffloadConnector")
"""The variants, in the order in which they run.

They are plain vLLM, the store with host memory, the store with host memory and a disk, the same store reopened in a new
process with the files of that disk, and vLLM's two connectors.
"""


def token_nbytes(shape: dict[str, Any]) -> int:
    """Return the bytes of a token's K and V in all layers."""
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return int(numbers) * NUMBER_NBYTES[shape["torch_dtype"]]


def transfer_of(life: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of vLLM's KVTransferConfig for the variant ``life``, or None for plain vLLM."""
    if life == "plain":
        return None
    host_nbytes = int(options.host_gib * (1 << 30))
    if life in ("host", "disk", "restarted"):
        config: dict[str, Any] = {"host": {"capacity": host_nbytes}}
        if life != "host":
            config["nvme"] = {"path": options.folder, "capacity": int(options.disk_gib * (1 << 30))}
        extra: dict[str, Any] = {"config": config, "load": options.load}
        if options.layout:
            extra["layout"] = options.layout
        name, module = "TierStoreConnector", {"kv_connector_module_path": "tierstore.adapters.vllm"}
    else:
        name, module, extra = life, {}, {"cpu_bytes_to_use": host_nbytes}
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **module,
    }


class Life:
    """A vLLM engine with scheduler and worker in this process."""

    def __init__(self, life: str, options: argparse.Namespace) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        shape = SHAPES[options.shape]
        model = Path(tempfile.mkdtemp())
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **shape,
        }
        (model / "config.json").write_text(json.dumps(config))
        transfer = transfer_of(life, options)
        more = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        if options.device == "cpu":
            more |= {"num_gpu_blocks_override": 4 * (options.tokens // options.block_size + 4)}
        began = time.perf_counter()
        self._llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=options.tokens + 1024,
            gpu_memory_utilization=0.85,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_num_batched_tokens=8192,
            block_size=options.block_size,
            disable_log_stats=False,
            max_num_seqs=8,
            **more,
        )
        self.init_s = time.perf_counter() - began
        self._vocabulary = shape["vocab_size"]
        self._dice = random.Random(life)

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Return random tokens, the same in every life for the same seed. ``tokens`` includes those of the question."""
        dice = random.Random(seed)
        return [dice.randrange(10, self._vocabulary) for _ in range(tokens - QUESTION)]

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Ask a new question. Return the time to first token in seconds, and the number of cached prompt tokens."""
        from vllm import SamplingParams

        question = [self._dice.randrange(10, self._vocabulary) for _ in range(QUESTION)]
        asked: Any = [{"prompt_token_ids": prompt + question}]
        wanted = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        began = time.perf_counter()
        output = self._llm.generate(asked, wanted, use_tqdm=False)[0]
        return {"s": round(time.perf_counter() - began, 4), "cached": output.num_cached_tokens}

    def settle(self, seconds: float) -> None:
        """Run short new prompts, so that the engine advances transfers that continue after a request has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask([self._dice.randrange(10, self._vocabulary) for _ in range(QUESTION)])
            time.sleep(0.05)

    def forget(self) -> bool:
        """Empty the engine's own prefix cache. Return whether this succeeded."""
        return bool(self._llm.reset_prefix_cache())

    def end(self) -> None:
        """Shut the engine down as a server does."""
        self._llm.llm_engine.engine_core.shutdown(timeout=120.0)


def live(life: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the variant ``life`` of the engine, and return its measurements. Each list has one item per repetition."""
    engine = Life(life, options)
    row: dict[str, Any] = {"life": life, "tokens": options.tokens, "init_s": round(engine.init_s, 1)}
    # Warm up compilation and allocation. After a restart, use prompts that no earlier life has stored on disk.
    for seed in (os.getpid() << 8, (os.getpid() << 8) + 1) if life == "restarted" else (99,):
        engine.ask(engine.prompt(seed, min(options.tokens, 9000)))
    if life == "restarted":
        row["restarted"] = [engine.ask(engine.prompt(0, options.disk_tokens))]
        row["recompute_as_long"] = [engine.ask(engine.prompt(50, options.disk_tokens))]
        engine.end()
        return row
    tokens = options.disk_tokens if life == "disk" else options.tokens
    prompts = [engine.prompt(seed, tokens) for seed in range(1 if life == "disk" else options.times)]
    row["recompute"] = [engine.ask(prompt) for prompt in prompts]
    row["gpu_hit"] = [engine.ask(prompts[-1]) for _ in range(3)]
    if life != "plain":
        row["restore"] = []
        for _ in range(options.restores):
            engine.settle(options.settle_s)
            row["forgotten"] = engine.forget()
            row["restore"].append(engine.ask(prompts[-1]))
    engine.settle(options.settle_s)
    engine.end()
    return row


def link_gbps(device: str) -> float:
    """Measure the rate of one contiguous copy from pinned memory to the device, in 10^9 bytes/s."""
    from tierstore.bench.link import Ceiling

    ceiling = Ceiling(device, (1 << 30) if device != "cpu" else (16 << 20))
    return median(ceiling.gbps("h2d") for _ in range(6))


def ratios(rows: dict[str, dict[str, Any]], shape: dict[str, Any], gbps: float) -> dict[str, float]:
    """Return the ratios that have target values, except those that need a life that failed."""

    def best(life: str, what: str) -> float | None:
        found = [answer["s"] for answer in rows.get(life, {}).get(what, ())]
        return median(found) if found else None

    found: dict[str, float] = {}
    restore, hit = best("host", "restore"), best("host", "gpu_hit")
    peers = [s for s in (best(life, "restore") for life in LIVES[4:]) if s is not None]
    if restore and peers:
        found["restore / better peer"] = restore / min(peers)
    if restore and hit:
        cached = rows["host"]["restore"][-1]["cached"]
        found["(restore - GPU hit) / link"] = (restore - hit) / (cached * token_nbytes(shape) / gbps / 1e9)
    plain = best("plain", "recompute")
    for life in ("host", *LIVES[4:]):
        storing = best(life, "recompute")
        if plain and storing:
            found[f"recompute, {life} / plain"] = storing / plain
    return {name: round(value, 4) for name, value in found.items()}


def lives(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run each life in a separate process, and yield its row. A life that fails has an ``error``."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # otherwise vLLM 0.26 hashes blocks differently in every process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for life in options.only.split(","):
        command = [sys.executable, "-m", "tests.gpu.vllm_on_card", *sys.argv[1:], "--life", life]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            yield {"life": life, "error": "it had not ended after 300 s"}
            continue
        if options.logs:
            (Path(options.logs) / f"{life}.log").write_text(ended.stdout + ended.stderr)
        last = ended.stdout.splitlines()[-1:] or [""]
        if ended.returncode == 0 and last[0].startswith("{"):
            yield json.loads(last[0])
        else:
            yield {"life": life, "error": (ended.stdout + ended.stderr)[-600:]}


def main() -> None:
    """Run each variant in its own process and print a report, or run the variant ``--life`` in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda:0", help="cpu, or a GPU such as cuda:0")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of a prompt")
    parser.add_argument("--disk-tokens", type=int, default=16384, help="tokens of the prompt on disk")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--times", type=int, default=2, help="prompts computed in each life")
    parser.add_argument("--restores", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=4.0, help="seconds for stores after a request")
    parser.add_argument("--host-gib", type=float, default=40.0)
    parser.add_argument("--disk-gib", type=float, default=8.0)
    parser.add_argument("--folder", default="", help="folder of the disk tier; default: temporary")
    parser.add_argument("--load", choices=["always", "if_faster"], default="always", help="setting `load`")
    parser.add_argument(
        "--layout", default="", help="layout of vLLM's KV memory with the store; default: vLLM's own"
    )
    parser.add_argument("--logs", default="", help="folder for the logs of all lives")
    parser.add_argument("--only", default=",".join(LIVES), help="lives to run, separated by commas")
    parser.add_argument("--life", default="", help="run only this life, in this process")
    options = parser.parse_args()
    if options.life:
        sys.stdout.write(json.dumps(live(options.life, options)) + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="tierstore-card-") as folder:
        if not options.folder:
            options.folder = folder
            sys.argv += ["--folder", folder]
        rows: dict[str, dict[str, Any]] = {}
        for row in lives(options):
            rows[row["life"]] = row
            sys.stderr.write(json.dumps(row) + "\n")
            sys.stderr.flush()
    gbps = link_gbps(options.device)
    report = {
        "link_gbps": round(gbps, 2),
        "ratios": ratios(rows, SHAPES[options.shape], gbps),
        "rows": list(rows.values()),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
