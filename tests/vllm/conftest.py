"""Fixtures that start engines or return the answers of vLLM without a connector."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from tests.vllm import tiny_model
from tests.vllm.hybrid_engines import Hybrid
from tests.vllm.runner import Engines, Prompt, ask
from tierstore.demo.model import prepare_model

Oracle = Callable[[Sequence[Prompt], int], list[list[int]]]


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of SmolLM2."""
    model = prepare_model(lambda line: print(line, file=sys.stderr))  # noqa: T201
    return Engines(_python(request), model, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def small_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small random model. It has no tokenizer, so prompts are token IDs."""
    folder = tmp_path_factory.mktemp("small-engines")
    model = tiny_model.save(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def window_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small random model with full attention and sliding windows, in separate KV groups."""
    folder = tmp_path_factory.mktemp("window-engines")
    model = tiny_model.save_with_windows(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def shared_layer_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small random model in which some layers use another layer's KV."""
    folder = tmp_path_factory.mktemp("shared-layer-engines")
    model = tiny_model.save_with_shared_layers(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def staged_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small random model with three layers, which two pipeline stages cannot share equally."""
    folder = tmp_path_factory.mktemp("staged-engines")
    model = tiny_model.save(folder / "model", layers=3)
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def single_head_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small model with one KV head, which vLLM requires for decode context parallelism."""
    folder = tmp_path_factory.mktemp("single-head-engines")
    model = tiny_model.save(folder / "model", kv_heads=1)
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def mla_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return ``Engines`` of a small random model with MLA."""
    folder = tmp_path_factory.mktemp("mla-engines")
    model = tiny_model.save_with_mla(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Hybrid]:
    """Return a function that returns the ``Hybrid`` with a given name. Each model is created only once."""
    python = _python(request)
    return lru_cache(lambda name: Hybrid(name, python, tmp_path_factory.mktemp("hybrid-engines")))


@pytest.fixture(scope="session")
def oracle(engines: Engines) -> Oracle:
    """Return a function that answers prompts with SmolLM2 on vLLM, without a connector and without its prefix cache.

    The answers are lists of tokens. Each prompt is computed once.
    """
    return _oracle(engines)


@pytest.fixture(scope="session")
def small_oracle(small_engines: Engines) -> Oracle:
    """Return a function like ``oracle`` for the model of ``small_engines``."""
    return _oracle(small_engines, [(tiny_model.prompts(12, 180), 40), (tiny_model.of_many_lengths(), 40)])


@pytest.fixture(scope="session")
def window_oracle(window_engines: Engines) -> Oracle:
    """Return a function like ``oracle`` for the model of ``window_engines``."""
    return _oracle(window_engines)


def _python(request: pytest.FixtureRequest) -> Path:
    python: Path = request.config.getoption("--vllm-python")
    assert python.exists(), f"{python} is not there: run `make test-vllm`, or name another with --vllm-python"
    return python.absolute()


def _oracle(engines: Engines, ahead: Sequence[tuple[Sequence[Prompt], int]] = ()) -> Oracle:
    """Return an oracle. Its first call also computes the answers to ``ahead``, which later tests need."""
    known: dict[str, list[int]] = {}
    later = list(ahead)

    def tokens_of(prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
        if any(len(known.get(str(prompt), ())) < tokens for prompt in prompts):
            wanted: dict[int, list[Prompt]] = {}
            for more, length in [(prompts, tokens), *later]:
                new = [prompt for prompt in more if len(known.get(str(prompt), ())) < length]
                wanted.setdefault(length, []).extend(p for p in new if p not in wanted.get(length, ()))
            later.clear()
            lives = engines.life(
                [ask(asked, length) for length, asked in sorted(wanted.items())],
                enable_prefix_caching=False,
                in_process=True,
            )
            for (_, asked), answers in zip(sorted(wanted.items()), lives, strict=True):
                known.update((str(p), a["tokens"]) for p, a in zip(asked, answers, strict=True))
        return [known[str(prompt)][:tokens] for prompt in prompts]

    return tokens_of
