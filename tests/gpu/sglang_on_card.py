"""Checks the storage backend in real SGLang on a card: are answers the same with and without TierStore?

Run ``python -m tests.gpu.sglang_on_card`` in an environment that has SGLang 0.5.23. There are three small random
models: a dense one, one with sliding windows, and a hybrid with recurrent states. For each model, four engines answer
the same prompts, each in a process of its own:

- ``plain``: SGLang without a hierarchical cache. Its second answers come from its own prefix cache. How much they
  differ from its first ones is SGLang's own rounding, since a prompt with a cached prefix is computed in other shapes.
- ``tier``: SGLang with TierStore. After a flush of SGLang's caches, the prompts come from disk.
- ``restarted``: another engine with the same files. Its first answers come from disk.
- ``mixed up``: another engine with a copy of these files, whose backend returns pages of the prompt before. Its answers
  must differ. If they did not, equal answers of the other engines would prove nothing.

Weights and activations are bfloat16, because SGLang's kernels on CUDA (norms, for example) take no float32. So tokens
whose probabilities are almost equal may be exchanged by rounding. Therefore the log-probabilities of the chosen tokens
are compared too, with a tolerance that follows from ``plain``.

The last line of output is a JSON object with a row per model. The exit code is 1 if a model failed.

With ``--device cpu``, the program itself can be tried without a GPU: SGLang's Triton kernels run in Triton's
interpreter, and ``tests.sglang.shims`` stands in for its other kernels. The dense model uses torch for attention.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

MODELS = ("dense", "window", "hybrid")
PROMPTS = (1500, 1400, 1300, 1200, 1100)
"""Lengths in tokens. They fall, so that the prompt before has a page for each page that is mixed up."""
VOCABULARY = 2048
ANSWER = 16
LEAST_TOLERANCE = 0.05
"""Least tolerance of a log-probability: logits of 8 to 16 in bfloat16 are 1/16 apart."""
Answer = dict[str, Any]


def save_model(kind: str, folder: Path) -> None:
    """Write a small random model. Its weights are large, so that different tokens have clearly different logits."""
    import torch
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model: Any
    if kind == "dense":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    elif kind == "window":
        # SGLang has a pool for the windows of Gemma 4, but not of Gemma 3.
        model = transformers.Gemma4ForCausalLM(
            transformers.Gemma4TextConfig(
                **shared,
                global_head_dim=64,  # type: ignore[call-arg]  # one of the fields that its decorator adds
                sliding_window=128,
                tie_word_embeddings=False,  # otherwise it repeats the last token of any prompt
                layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=VOCABULARY,
            )
        )
    else:
        model = transformers.FalconH1ForCausalLM(
            transformers.FalconH1Config(
                **shared,
                mamba_d_ssm=512,
                mamba_n_heads=8,
                mamba_d_head=64,
                mamba_d_state=64,
                mamba_n_groups=1,
                mamba_chunk_size=64,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    model.to(torch.bfloat16).save_pretrained(folder)
    if (
        kind == "window"
    ):  # SGLang asks for it; checkpoints of Gemma 4 have it in their multimodal configuration
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "swa_num_key_value_heads": 2}))


def prompts(device: str) -> list[list[int]]:
    """Return random prompts. None starts like another one. On the CPU they are shorter."""
    dice = random.Random(0)
    lengths = [length // 4 for length in PROMPTS] if device == "cpu" else PROMPTS
    return [[dice.randrange(10, VOCABULARY) for _ in range(length)] for length in lengths]


# -- an engine, in a process of its own --------------------------------------------------------------------


class Life:
    """A running engine of SGLang. Its scheduler and model run in a process of their own."""

    def __init__(self, name: str, options: argparse.Namespace):
        from sglang.srt.entrypoints.engine import Engine

        cpu = options.device == "cpu"
        page = 16 if cpu else options.page_size
        settings: dict[str, Any] = {
            "model_path": str(Path(options.folder) / options.model / "model"),
            "skip_tokenizer_init": True,
            "attention_backend": "torch_native" if cpu and options.model == "dense" else options.attention,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.1 if cpu else 0.2,
            "max_total_tokens": 4096 if cpu else 16384,
            "max_running_requests": 4,
            "page_size": page,
            "random_seed": 0,
            "enable_cache_report": True,
            "log_level": "info",
            "port": options.port,
        }
        if cpu:
            settings["device"] = "cpu"
        if options.model == "hybrid":
            settings |= {"mamba_radix_cache_strategy": "extra_buffer", "max_mamba_cache_size": 64}
        if name != "plain":
            mixed_up = name == "mixed up"
            storage = {
                "backend_name": "tierstore",
                "module_path": "tests.sglang.faulty" if mixed_up else "tierstore.adapters.sglang",
                "class_name": "PageOfThePromptBefore" if mixed_up else "TierStoreStorage",
                "interface_v1": 1,
                "prefetch_threshold": page,
                "staging": "32MiB",
                "config": {"nvme": {"path": options.disk, "capacity": "1GiB"}},
            }
            settings |= {
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_mem_layout": options.layout,
                "hicache_io_backend": options.io,
                "hicache_write_policy": "write_through",
                "hicache_storage_backend": "dynamic",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps(storage),
            }
        self._dice = random.Random(os.getpid())
        self._engine = Engine(**(settings | json.loads(options.more)))

    def ask(self, asked: Sequence[list[int]]) -> list[Answer]:
        """Answer the prompts one after the other."""
        found = []
        for prompt in asked:
            output: Any = self._engine.generate(
                input_ids=[prompt],
                sampling_params={"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True},
                return_logprob=True,
            )[0]
            meta = output["meta_info"]
            details = meta.get("cached_tokens_details") or {}
            found.append(
                {
                    "tokens": [int(token) for token in output["output_ids"]],
                    "logprobs": [float(each[0]) for each in meta["output_token_logprobs"]],
                    "cached": int(meta["cached_tokens"]),
                    **{where: int(details.get(where) or 0) for where in ("device", "host", "storage")},
                }
            )
        return found

    def settle(self, seconds: float) -> None:
        """Answer new prompts shorter than a page, so that the engine advances copies to host memory and disk."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask([[self._dice.randrange(10, VOCABULARY) for _ in range(12)]])
            time.sleep(0.1)

    def flush(self) -> None:
        """Empty SGLang's caches on the card and in host memory."""
        deadline = time.monotonic() + 10
        while not self._engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise TimeoutError("SGLang did not flush its caches within 10 s")
            time.sleep(0.1)

    def end(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()


def live(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine. Return its answers by phase."""
    began = time.monotonic()
    engine = Life(name, options)
    found: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1)}
    asked = prompts(options.device)
    found["first"] = engine.ask(asked)
    if name != "mixed up":
        found["again"] = engine.ask(asked)
    if name in ("plain", "tier"):
        engine.settle(2.0)
        engine.flush()
        found["flushed"] = engine.ask(asked)
    if name == "tier":
        engine.settle(2.0)  # the disk gets its pages
    found["s"] = round(time.monotonic() - began, 1)
    Path(options.result).write_text(json.dumps(found))
    engine.end()
    return found


def prepare_cpu() -> None:
    """Replace the parts of SGLang that need a GPU or that its CPU build brings. Call it before SGLang is imported."""
    import torch

    from tests.sglang import shims

    def rotary_embedding(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        cos, sin = cache[positions].chunk(2, dim=-1)
        for tensor in (query, key):
            heads = tensor.view(tensor.shape[0], -1, head_size)
            c, s = cos.unsqueeze(1).to(tensor.dtype), sin.unsqueeze(1).to(tensor.dtype)
            one, two = heads.chunk(2, dim=-1) if is_neox else (heads[..., ::2], heads[..., 1::2])
            turned = one * c - two * s, two * c + one * s
            one.copy_(turned[0])
            two.copy_(turned[1])

    shims.install()
    package, operations = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    vars(operations)["rotary_embedding"] = rotary_embedding
    vars(package)["_custom_ops"] = operations
    sys.modules.update({"vllm": package, "vllm._custom_ops": operations})

    mamba = import_module("sglang.srt.layers.attention.mamba.mamba")
    convolutions = import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        vars(mamba)[name] = vars(convolutions)[name]
    checks = import_module("sglang.srt.arg_groups.mamba_hook")
    vars(checks)["_platform_supports_mamba_cache_extra_buffer"] = lambda: True


# -- all engines of a model --------------------------------------------------------------------------------


class Case:
    """A model and its engines."""

    def __init__(self, model: str, options: argparse.Namespace, slots: threading.Semaphore):
        self._model, self._options, self._slots = model, options, slots
        self._home = Path(options.folder) / model
        self._home.mkdir(parents=True, exist_ok=True)
        self._lives: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """Run the engines, and return a row that says which answers were equal."""
        began = time.monotonic()
        row: dict[str, Any] = {"model": self._model}
        try:
            self._child("model", "")
            with ThreadPoolExecutor(2) as pool:
                [*pool.map(self._child, ("plain", "tier"), ("", "disk"))]
                shutil.copytree(self._home / "disk", self._home / "copy")
                [*pool.map(self._child, ("restarted", "mixed up"), ("disk", "copy"))]
        except (RuntimeError, OSError) as error:
            row["error"] = str(error)
        if "plain" in self._lives:
            row |= compared(self._lives)
        row["ok"] = "error" not in row and not row.get("faults", ["plain did not run"])
        return row | {"s": round(time.monotonic() - began, 1)}

    def _child(self, name: str, disk: str) -> None:
        """Run ``name`` in a process of its own, with a time limit, and read its answers."""
        result, log = self._home / f"{name}.json", Path(self._options.logs) / f"{self._model}.{name}.log"
        number = MODELS.index(self._model) * 8 + ("model", "plain", "tier", "restarted", "mixed up").index(
            name
        )
        command = [sys.executable, "-m", "tests.gpu.sglang_on_card", *sys.argv[1:], "--life", name]
        command += ["--model", self._model, "--folder", self._options.folder, "--result", str(result)]
        command += ["--disk", str(self._home / disk), "--port", str(31000 + 200 * number)]
        with self._slots, log.open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(self._options.device),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = child.wait(self._options.limit)
                said = f"ended with {code}"
            except subprocess.TimeoutExpired:
                code, said = -1, f"had not ended after {self._options.limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # the processes that SGLang started
                child.wait()
        if name != "model" and result.exists():
            self._lives[name] = json.loads(result.read_text())
        elif name == "model" and code == 0:
            pass
        else:
            raise RuntimeError(f"{name} {said}: {log.read_text(errors='replace')[-3000:]}")


def environment(device: str) -> dict[str, str]:
    """Return the environment variables of an engine."""
    added = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "0"}
        added |= {"TRITON_INTERPRET": "1"}
    return os.environ | added


def compared(lives: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the answers of all engines with those of plain SGLang.

    Returns:
        The noise of plain SGLang, a row per engine and phase, and the faults that were found. In a row, answers are
        compared with plain SGLang's of the same shapes ("again" if a prefix is cached, otherwise "first") and with its
        first ones. "differs" is the largest difference of a log-probability. An answer agrees if it is one of the two
        but for rounding. "device", "host" and "storage" say where the tokens of each prompt came from.
    """
    plain = lives["plain"]
    noise = max(difference(plain["first"], plain[phase]) for phase in ("again", "flushed"))
    tolerance = max(2 * noise, LEAST_TOLERANCE)
    row: dict[str, Any] = {
        "start_s": {name: life["start_s"] for name, life in lives.items()},
        "life_s": {name: life["s"] for name, life in lives.items()},
        "noise of plain SGLang": noise,
        "tolerance": tolerance,
        "phases": [],
    }
    faults = []
    for name, life in lives.items():
        for phase in ("first", "again", "flushed"):
            if phase not in life:
                continue
            answers = life[phase]
            from_disk = (name, phase) in (("tier", "flushed"), ("restarted", "first"), ("mixed up", "first"))
            # What comes from disk is computed in the same shapes as what comes from SGLang's own cache.
            same = "again" if from_disk or phase == "again" else "first"
            agree = [
                agrees(one, other, tolerance) or agrees(two, other, tolerance)
                for one, two, other in zip(plain["first"], plain["again"], answers, strict=True)
            ]
            row["phases"].append(
                {
                    "engine": name,
                    "phase": phase,
                    "prompts": len(answers),
                    "tokens equal": equal(plain[same], answers),
                    "bit for bit": equal(plain[same], answers, bits=True),
                    "tokens equal to first": equal(plain["first"], answers),
                    "agree": sum(agree),
                    "differs by": difference(plain[same], answers),
                    "differs from first by": difference(plain["first"], answers),
                    **{
                        where: [answer[where] for answer in answers]
                        for where in ("cached", "device", "host", "storage")
                    },
                }
            )
            what = f"{name}, {phase}"
            if from_disk and not all(answer["storage"] for answer in answers):
                faults.append(f"{what}: a prompt came not from disk")
            if name == "mixed up":
                # On an H200 all other answers are equal bit for bit, so any difference shows that pages were mixed up.
                unnoticed = equal(plain[same][1:], answers[1:], bits=True)
                if unnoticed:
                    faults.append(
                        f"{what}: {unnoticed} answers from pages of another prompt were not noticed"
                    )
            if name != "mixed up" and not all(agree):
                faults.append(f"{what}: {len(agree) - sum(agree)} answers differ from plain SGLang's")
    return row | {"faults": faults}


def equal(one: Sequence[Answer], other: Sequence[Answer], bits: bool = False) -> int:
    """Return how many answers have the same tokens and, if ``bits``, exactly the same log-probabilities."""
    return sum(
        a["tokens"] == b["tokens"] and (not bits or a["logprobs"] == b["logprobs"])
        for a, b in zip(one, other, strict=True)
    )


def _difference(one: Answer, other: Answer) -> float:
    """Return the largest difference of the log-probabilities, up to the first token that differs."""
    worst = 0.0
    for token, its, mine, theirs in zip(
        one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True
    ):
        worst = max(worst, abs(mine - theirs))
        if token != its:
            break
    return worst


def difference(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Return the largest difference of the log-probabilities of all prompts. See ``_difference``."""
    return round(max(_difference(a, b) for a, b in zip(one, other, strict=True)), 5)


def agrees(one: Answer, other: Answer, tolerance: float) -> bool:
    """Return whether the answers are the same but for rounding.

    Where the first token differs, both must be almost equally probable: then rounding decides which one is chosen.
    """
    return _difference(one, other) <= tolerance


def report(row: dict[str, Any]) -> None:
    """Print a line per engine and phase."""
    for each in row.get("phases", ()):
        found = ", ".join(f"{where} {sum(each[where])}" for where in ("device", "host", "storage"))
        sys.stdout.write(
            f"{row['model']}: {each['engine']}, {each['phase']}: of {each['prompts']} prompts "
            f"{each['tokens equal']} have plain's tokens, {each['bit for bit']} bit for bit (differs by "
            f"{each['differs by']}), {each['tokens equal to first']} plain's first tokens (differs by "
            f"{each['differs from first by']}), {each['agree']} agree; tokens from {found}\n"
        )
    for fault in row.get("faults", ()):
        sys.stdout.write(f"{row['model']}: FAULT: {fault}\n")
    if "error" in row:
        sys.stdout.write(f"{row['model']}: ERROR: {row['error']}\n")
    sys.stdout.flush()


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help=f"models, separated by commas; default: {','.join(MODELS)}"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend")
    parser.add_argument("--layout", default="page_first", help="--hicache-mem-layout")
    parser.add_argument("--io", default="kernel", help="--hicache-io-backend")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--more", default="{}", help="more arguments of SGLang's Engine, in JSON")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for one engine")
    parser.add_argument("--at-once", type=int, default=0, help="engines at the same time; default: 6, CPU: 1")
    parser.add_argument("--folder", default="", help="folder for models and disk tiers; default: temporary")
    parser.add_argument("--logs", default="", help="folder for logs; default: in the other folder")
    for internal in ("--life", "--model", "--result", "--disk"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=31000, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run all models and print a report, or run the one engine ``--life``."""
    options = parsed()
    if options.life == "model":
        save_model(options.model, Path(options.folder) / options.model / "model")
        return
    if options.life:
        live(options.life, options)
        return
    began = time.monotonic()
    options.folder = options.folder or tempfile.mkdtemp(prefix="tierstore-sglang-")
    options.logs = options.logs or str(Path(options.folder) / "logs")
    Path(options.logs).mkdir(parents=True, exist_ok=True)
    models = (options.only or (MODELS[0] if options.device == "cpu" else ",".join(MODELS))).split(",")
    if unknown := set(models) - set(MODELS):
        raise SystemExit(f"--only: unknown models {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    slots = threading.Semaphore(options.at_once or (1 if options.device == "cpu" else 6))
    with ThreadPoolExecutor(len(models)) as pool:
        rows = []
        for row in pool.map(lambda model: Case(model, options, slots).run(), models):
            report(row)
            rows.append(row)
    whole = {
        "ok": all(row["ok"] for row in rows),
        "s": round(time.monotonic() - began, 1),
        "device": options.device,
        "models": rows,
    }
    sys.stdout.write(json.dumps(whole) + "\n")
    sys.exit(0 if whole["ok"] else 1)


# SGLang starts processes that import this module again, as __mp_main__.
if __name__ in ("__main__", "__mp_main__"):
    _options = parsed()
    if _options.life not in ("", "model") and _options.device == "cpu":
        prepare_cpu()

if __name__ == "__main__":
    main()
