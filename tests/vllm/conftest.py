"""Places for lives of engines, and what plain vLLM answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.vllm import tiny_model
from tests.vllm.runner import Engines, Prompt, ask
from tierstore.demo.model import prepare_model

Oracle = Callable[[Sequence[Prompt], int], list[list[int]]]


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines of SmolLM2."""
    model = prepare_model(lambda line: print(line, file=sys.stderr))  # noqa: T201
    return Engines(_python(request), model, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def small_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines of a small random model, which is asked by token ids."""
    folder = tmp_path_factory.mktemp("small-engines")
    model = tiny_model.save(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def window_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines of a small random model with layers of full attention and with windows, in groups of their own."""
    folder = tmp_path_factory.mktemp("window-engines")
    model = tiny_model.save_with_windows(folder / "model")
    return Engines(_python(request), model, folder, {"skip_tokenizer_init": True})


@pytest.fixture(scope="session")
def oracle(engines: Engines) -> Oracle:
    """What SmolLM2 on vLLM without any connector or cache answers, token by token; each prompt is asked once."""
    return _oracle(engines)


@pytest.fixture(scope="session")
def small_oracle(small_engines: Engines) -> Oracle:
    """The same of the small model."""
    return _oracle(small_engines)


@pytest.fixture(scope="session")
def window_oracle(window_engines: Engines) -> Oracle:
    """The same of the model with windows."""
    return _oracle(window_engines)


def _python(request: pytest.FixtureRequest) -> Path:
    python: Path = request.config.getoption("--vllm-python")
    assert python.exists(), f"{python} is not there: run `make test-vllm`, or name another with --vllm-python"
    return python.absolute()


def _oracle(engines: Engines) -> Oracle:
    known: dict[tuple[str, int], list[int]] = {}

    def tokens_of(prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
        new = {str(prompt): prompt for prompt in prompts if (str(prompt), tokens) not in known}
        if new:
            (answers,) = engines.life(
                [ask(list(new.values()), tokens)], enable_prefix_caching=False, in_process=True
            )
            known.update(((name, tokens), a["tokens"]) for name, a in zip(new, answers, strict=True))
        return [known[str(prompt), tokens] for prompt in prompts]

    return tokens_of
