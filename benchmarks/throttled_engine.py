"""Measures real vLLM engines on the CPU with a disk that is limited to a given throughput.

Compares plain vLLM with the connector, with several questions at a time. Every contender runs an engine in a separate
process. All engines stay open, and the contenders take turns: in each round every contender answers the same questions.
Other work on the machine therefore slows all of them down alike.

    python -m benchmarks.throttled_engine --vllm-python .venv-vllm/bin/python --json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from threading import Lock
from time import monotonic, process_time, sleep, thread_time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.table import Table
from typer import Option, echo
from typer import run as typer_run

from benchmarks.document_questions import Documents, ask_about
from tierstore.cli.output import print_json, wide_console

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ("plain", "always", "if_faster")
"""The contenders by default: vLLM without the connector, and two values of the setting ``load``.

``idle`` is also accepted: the connector as ``kv_consumer`` on an empty directory, so that it neither loads nor stores.
"""
_VOCABULARY = 512
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 3, 6, 2, 64, 32
_SLICE_NBYTES = 128 << 10
_TOKEN_NBYTES = _LAYERS * 2 * _KV_HEADS * _HEAD_DIM * 4


@dataclass(frozen=True)
class Workload(Documents):
    """Documents, and the questions that each contender is asked about them in a round.

    Attributes:
        at_a_time: Number of questions that are in the engine at the same time.
        asked: Number of questions about each document in a round.
        in_turn: Whether questions go through the documents in a fixed cyclic order instead of a random one. The next
            document has then always been evicted from the engine's own cache and from host memory, unless all
            documents fit.
        budget: Maximum number of tokens per step.
    """

    documents: int = 8
    tokens: int = 2048
    question: int = 32
    answer: int = 8
    in_host: float = 4.0
    in_hbm: float = 4.5
    at_a_time: int = 4
    asked: int = 3
    in_turn: bool = False
    budget: int = 2048


class Throttle:
    """Limits the total throughput of reads with ``os.preadv`` and writes with ``os.pwritev`` in this process.

    Concurrent transfers share the throughput: they take turns, 128 KiB at a time. Thread-safe.
    """

    def __init__(self, nbytes_per_s: float) -> None:
        self._rate = nbytes_per_s
        self._lock = Lock()
        self._free = 0.0
        self.read = self.written = 0

    def install(self) -> None:
        """Replace ``os.preadv`` and ``os.pwritev`` in this process."""
        preadv, pwritev = os.preadv, os.pwritev

        def throttled_read(*arguments: Any) -> int:
            done = preadv(*arguments)
            with self._lock:
                self.read += done
            self._wait(done)
            return done

        def throttled_write(*arguments: Any) -> int:
            done = pwritev(*arguments)
            with self._lock:
                self.written += done
            self._wait(done)
            return done

        os.preadv, os.pwritev = throttled_read, throttled_write

    def _wait(self, nbytes: int) -> None:
        for start in range(0, nbytes, _SLICE_NBYTES):
            with self._lock:
                now = monotonic()
                self._free = max(self._free, now) + min(_SLICE_NBYTES, nbytes - start) / self._rate
                wait_s = self._free - now
            sleep(wait_s)


class Round(NamedTuple):
    """One contender's measurements of one round. Times are in seconds."""

    contender: str
    disk_mbps: float
    number: int
    questions_per_s: float
    median_ttft_s: float
    worst_ttft_s: float
    cached: float
    """Fraction of the prompt tokens that were not computed."""
    external: float
    """Fraction of the prompt tokens that the connector loaded."""
    cpu_s: float
    """CPU time of the whole process."""
    engine_cpu_s: float
    """CPU time of the thread that steps the engine."""
    read_mb: float
    written_mb: float
    equal: float | None
    """Fraction of the answers that equal those of plain vLLM. None if plain vLLM is not compared."""


def main(
    vllm_python: Annotated[Path, Option(help="Python interpreter that has vLLM for the CPU")] = Path(
        ".venv-vllm/bin/python"
    ),
    disk: Annotated[list[float] | None, Option(help="disk throughput in MB/s, repeatable")] = None,
    contender: Annotated[
        list[str] | None, Option(help="one of plain, always, if_faster and idle, repeatable")
    ] = None,
    rounds: Annotated[int, Option(help="number of measured rounds")] = 4,
    asked: Annotated[int, Option(help="questions about each document per round")] = Workload.asked,
    at_a_time: Annotated[int, Option(help="questions at a time")] = Workload.at_a_time,
    in_host: Annotated[float, Option(help="documents that fit into host memory")] = Workload.in_host,
    in_turn: Annotated[
        bool, Option(help="ask about the documents in a fixed cyclic order, not at random")
    ] = False,
    restarted: Annotated[bool, Option(help="restart the engines before the measured rounds")] = False,
    as_json: Annotated[bool, Option("--json", help="print one line of JSON at the end")] = False,
) -> None:
    """Measure vLLM on the CPU with a slow disk, with and without the connector."""
    work = Workload(asked=asked, at_a_time=at_a_time, in_host=in_host, in_turn=in_turn)
    found: list[Round] = []
    with TemporaryDirectory() as folder:
        _save_model(Path(folder) / "model", work)
        for rate in disk or (8.0, 60.0):
            found += _compared(
                vllm_python, Path(folder), work, contender or CONTENDERS, rate, rounds, restarted
            )
    show(found)
    if as_json:
        print_json({"rows": [row._asdict() for row in found]})


def show(found: Sequence[Round]) -> None:
    """Print the medians over the rounds, and the ratios to plain vLLM in the same round."""
    table = Table(
        "disk", "contender", "questions/s", "of plain, by round", "TTFT median", "worst", "loaded", "CPU"
    )
    plain = {(row.disk_mbps, row.number): row.questions_per_s for row in found if row.contender == "plain"}
    for rate, name in dict.fromkeys((row.disk_mbps, row.contender) for row in found):
        rows = [row for row in found if (row.disk_mbps, row.contender) == (rate, name)]
        ratios = [
            row.questions_per_s / plain[rate, row.number] for row in rows if (rate, row.number) in plain
        ]
        table.add_row(
            f"{rate:g} MB/s",
            name,
            f"{median(row.questions_per_s for row in rows):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{median(row.median_ttft_s for row in rows):.2f} s",
            f"{max(row.worst_ttft_s for row in rows):.2f} s",
            f"{median(row.external for row in rows):.0%}",
            f"{median(row.cpu_s for row in rows):.1f} s",
            "" if rows[0].equal is None else f"{min(row.equal or 0.0 for row in rows):.0%}",
        )
    wide_console().print(table)


def _compared(
    python: Path,
    folder: Path,
    work: Workload,
    contenders: Sequence[str],
    rate: float,
    rounds: int,
    restarted: bool,
) -> list[Round]:
    """Open an engine for each contender, and let them take turns. The order changes from round to round."""
    engines = [_Engine(python, folder, work, name, rate) for name in contenders]
    try:
        for engine in engines:
            engine.ask([[number] for number in range(work.documents)], seed=-1, rest=True)
        if restarted:
            for engine in engines:
                engine.close()
            engines = [_Engine(python, folder, work, name, rate) for name in contenders]
        found, dice = [], Random(0)
        for number in range(rounds):
            order: list[int] = []
            for _ in range(work.asked):
                documents = range(work.documents)
                order += documents if work.in_turn else dice.sample(documents, work.documents)
            answers: dict[str, list[list[int]]] = {}
            rows = []
            for turn in range(len(engines)):
                engine = engines[(turn + number) % len(engines)]
                figures, answers[engine.name] = engine.ask([order], seed=number)
                rows.append(Round(engine.name, rate, number, **figures, equal=None))
                echo(str(rows[-1]), err=True)
            found += [
                row._replace(equal=_equal(answers[row.contender], answers.get("plain"))) for row in rows
            ]
        return found
    finally:
        for engine in engines:
            engine.close()


def _equal(answers: list[list[int]], expected: list[list[int]] | None) -> float | None:
    if expected is None:
        return None
    return sum(one == other for one, other in zip(answers, expected, strict=True)) / len(expected)


class _Engine:
    """Starts an engine in a separate process, and exchanges messages with it."""

    def __init__(self, python: Path, folder: Path, work: Workload, name: str, rate: float) -> None:
        self.name = name
        home = folder / f"{name}-{rate:g}"
        home.mkdir(exist_ok=True)
        case = {
            "name": name,
            "home": str(home),
            "model": str(folder / "model"),
            "rate": rate * 1e6,
            "work": asdict(work),
        }
        answers, out = os.pipe()
        self._log = (home / "log.txt").open("wb")
        self._process = subprocess.Popen(
            [python.absolute(), "-m", "benchmarks.throttled_engine", "--child", json.dumps(case), str(out)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[out],
            cwd=ROOT,
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
        os.close(out)
        self._answers = os.fdopen(answers)
        self._path = home / "log.txt"

    def ask(
        self, orders: Sequence[Sequence[int]], seed: int, *, rest: bool = False
    ) -> tuple[dict[str, float], list[list[int]]]:
        assert self._process.stdin is not None
        line = json.dumps({"orders": orders, "seed": seed, "rest": rest})
        with suppress(BrokenPipeError):  # the process has ended, and reading its answer fails below
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        said = self._answers.readline()
        if not said:
            raise RuntimeError(f"the engine process of {self.name} exited: {self._path.read_text()[-4000:]}")
        figures, answers = json.loads(said)
        return figures, answers

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._log.close()


class _Child:
    """The engine, run by the separate process that ``_Engine`` starts."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._work = work = Workload(**case["work"])
        self._throttle = Throttle(case["rate"])
        self._throttle.install()
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        transfer = _transfer(case, work)
        longest = work.tokens + work.question + work.answer
        self._llm = LLM(
            model=case["model"],
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enforce_eager=True,
            dtype="float32",
            block_size=_BLOCK,
            max_model_len=longest + _BLOCK,
            max_num_batched_tokens=work.budget,
            max_num_seqs=8,
            num_gpu_blocks_override=int(work.in_hbm * longest / _BLOCK),
            enable_prefix_caching=True,
            **({} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}),
        )
        self._sampling = SamplingParams(
            temperature=0, max_tokens=work.answer, ignore_eos=True, detokenize=False
        )
        self._last = 0

    def ask(self, orders: Sequence[Sequence[int]], seed: int) -> tuple[dict[str, float], list[list[int]]]:
        """Ask about the documents, one order after another. Return figures by name, and the tokens of each answer.

        The next order starts once all questions of the previous one have been answered.
        """
        throttle, engine = self._throttle, self._llm.llm_engine
        external = self._external()
        read, written = throttle.read, throttle.written
        began, cpu, own = monotonic(), process_time(), thread_time()
        first: dict[str, float] = {}
        asked: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        cached = prompted = 0

        def ask(document: int) -> None:
            self._last += 1
            name = f"r{self._last}"
            asked[name] = monotonic()
            prompt = self._prompt(document, f"{seed} {self._last}")
            engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling)

        def step() -> int:
            nonlocal cached, prompted
            before = len(answers)
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, monotonic())
                if output.finished:
                    cached += output.num_cached_tokens or 0
                    prompted += len(output.prompt_token_ids)
                    answers[output.request_id] = list(output.outputs[0].token_ids)
            return len(answers) - before

        for order in orders:
            ask_about(order, self._work.at_a_time, ask, step)
        took = monotonic() - began
        times = [first[name] - at for name, at in asked.items()]
        figures = {
            "questions_per_s": len(times) / took,
            "median_ttft_s": median(times),
            "worst_ttft_s": max(times),
            "cached": cached / prompted,
            "external": (self._external() - external) / prompted,
            "cpu_s": process_time() - cpu,
            "engine_cpu_s": thread_time() - own,
            "read_mb": (throttle.read - read) / 1e6,
            "written_mb": (throttle.written - written) / 1e6,
        }
        return figures, [answers[name] for name in asked]

    def rest(self) -> None:
        """Step the engine until the connector has finished writing its pages to disk."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        while connector is not None and connector._scheduler._tiers.moving:
            self._llm.llm_engine.step()
            sleep(0.01)

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.llm_engine.engine_core.shutdown(timeout=60.0)

    def _external(self) -> float:
        return sum(
            float(getattr(metric, "value", 0.0))
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:external_prefix_cache_hits"
        )

    def _prompt(self, document: int, question: str) -> list[int]:
        return [*_tokens(f"document {document}", self._work.tokens), *_tokens(question, self._work.question)]


def _transfer(case: dict[str, Any], work: Workload) -> dict[str, Any] | None:
    name = case["name"]
    if name == "plain":
        return None
    document = work.tokens * _TOKEN_NBYTES
    config = {
        "host": {"capacity": int(work.in_host * document), "pin": "never"},
        "nvme": {
            "path": f"{case['home']}/disk",
            "capacity": 8 * work.documents * document,
            "payload": "extents",
        },
    }
    return {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore.adapters.vllm",
        "kv_role": "kv_consumer" if name == "idle" else "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "config": config,
            "load": "always" if name == "always" else "if_faster",
        },
    }


def _tokens(seed: str, count: int) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(3, _VOCABULARY) for _ in range(count)]


def _save_model(folder: Path, work: Workload) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = _HEADS * _HEAD_DIM
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=size,
            intermediate_size=1024,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            num_key_value_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            max_position_embeddings=2 * work.tokens,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that logits differ clearly, and equal answers are significant
    model.save_pretrained(folder)


def _serve(case: str, out: str) -> None:
    child = _Child(json.loads(case))
    with os.fdopen(int(out), "w") as answers:
        for line in sys.stdin:
            question = json.loads(line)
            answer = child.ask(question["orders"], question["seed"])
            if question["rest"]:
                child.rest()
            print(json.dumps(answer), file=answers, flush=True)
    child.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _serve(*sys.argv[2:])
    else:
        typer_run(main)
