"""A place for lives of engines, and what plain vLLM answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.vllm.runner import Engines, ask
from tierstore.demo.model import prepare_model

Oracle = Callable[[Sequence[str], int], list[list[int]]]


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    python: Path = request.config.getoption("--vllm-python")
    assert python.exists(), f"{python} is not there: run `make test-vllm`, or name another with --vllm-python"
    model = prepare_model(lambda line: print(line, file=sys.stderr))  # noqa: T201
    return Engines(python.absolute(), model, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def oracle(engines: Engines) -> Oracle:
    """What vLLM without any connector answers, token by token; each prompt is asked once."""
    known: dict[tuple[str, int], list[int]] = {}

    def tokens_of(prompts: Sequence[str], tokens: int) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, tokens) not in known]
        if new:
            (answers,) = engines.life([ask(new, tokens)], enable_prefix_caching=False)
            known.update(((p, tokens), a["tokens"]) for p, a in zip(new, answers, strict=True))
        return [known[prompt, tokens] for prompt in prompts]

    return tokens_of
