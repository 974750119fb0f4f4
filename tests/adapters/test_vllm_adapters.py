"""Test LoRA adapters in the simulated engine: an adapter reuses only KV that was computed with the same weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import LoRARequest
from tierstore.adapters.model_files import adapters_digest
from tierstore.adapters.vllm.keys import Adapters
from tierstore.errors import ConfigError

REUSED = 8
"""Tokens of the document that can be loaded: all its whole blocks. Only the last token has to be computed."""


def tiers(path: Path) -> dict[str, Any]:
    return {
        "host": {"capacity": 40 * 64, "pin": "never"},
        "nvme": {"path": str(path), "capacity": "1MiB", "flush": "10ms"},
    }


@contextmanager
def running(path: Path, **more: Any) -> Iterator[Engine]:
    engine = Engine(tiers(path), blocks=24, **more)
    try:
        yield engine
    finally:
        engine.close()


def train(folder: Path, weights: bytes | bytearray, alpha: int = 8) -> str:
    """Write the files of an adapter as PEFT does, and return their folder. Older files are replaced."""
    folder.mkdir(exist_ok=True)
    for name, content in (
        ("adapter_model.safetensors", weights),
        ("adapter_config.json", str(alpha).encode()),
    ):
        fresh = folder / f".{name}"
        fresh.write_bytes(content)
        fresh.replace(folder / name)
    return str(folder)


def ask(engine: Engine, lora: LoRARequest | None) -> int:
    """Empty the engine's own prefix cache, ask about the document, and return the number of reused tokens."""
    engine.forget()
    before = engine.taken
    engine.add(DOCUMENT, 2, lora=lora)
    engine.run()
    return engine.taken - before


@pytest.mark.parametrize("ranks", [1, 2])
def test_retrained_adapter_with_the_same_name_and_path_reads_no_older_kv_after_a_restart(
    tmp_path: Path, ranks: int
) -> None:
    path = train(tmp_path / "adapter", b"first" * 100)
    lora = LoRARequest("A", 1, path)
    with running(tmp_path / "disk", ranks=ranks) as engine:
        assert [ask(engine, lora) for _ in range(2)] == [0, REUSED]
    with running(tmp_path / "disk", ranks=ranks) as engine:
        assert ask(engine, lora) == REUSED
    train(tmp_path / "adapter", b"other" * 100)
    with running(tmp_path / "disk", ranks=ranks) as engine:
        assert [ask(engine, lora) for _ in range(2)] == [0, REUSED]
    train(tmp_path / "adapter", b"first" * 100)
    with running(tmp_path / "disk", ranks=ranks) as engine:
        assert ask(engine, lora) == REUSED


def test_one_changed_byte_or_another_scale_is_another_adapter(tmp_path: Path) -> None:
    weights = bytearray(3 << 18)
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", weights))
    with running(tmp_path / "disk") as engine:
        assert ask(engine, lora) == 0
    weights[500_003] = 1
    train(tmp_path / "adapter", weights)
    with running(tmp_path / "disk") as engine:
        assert ask(engine, lora) == 0
    train(tmp_path / "adapter", weights, alpha=16)
    with running(tmp_path / "disk") as engine:
        assert ask(engine, lora) == 0


def test_requests_without_an_adapter_keep_the_keys_that_they_had(tmp_path: Path) -> None:
    with running(tmp_path / "disk") as engine:
        assert ask(engine, None) == 0
        known = engine.half._namespaces
        lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"weights"))
        assert [ask(engine, lora), ask(engine, None)] == [0, REUSED]
        assert (
            engine.half._namespaces
            == known
            == engine.scheduler._deployment.groups.namespaces(engine.scheduler._deployment.identity)
        )


def test_adapters_with_one_name_are_distinguished_and_equal_ones_share_pages(tmp_path: Path) -> None:
    first = LoRARequest("A", 1, train(tmp_path / "one", b"one"))
    second = LoRARequest("A", 2, train(tmp_path / "two", b"two"))
    with running(tmp_path / "disk") as engine:
        assert [ask(engine, first), ask(engine, second)] == [0, 0]
        assert [ask(engine, first), ask(engine, second)] == [REUSED, REUSED]


@pytest.mark.parametrize("dropped", [False, True])
def test_files_changed_under_a_running_engine_end_reuse_for_that_adapter_id(
    tmp_path: Path, dropped: bool
) -> None:
    """vLLM may still use the old weights, or may already have loaded the new ones, so no page can be trusted."""
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"first"))
    with running(tmp_path / "disk") as engine:
        assert [ask(engine, lora) for _ in range(2)] == [0, REUSED]
        train(tmp_path / "adapter", b"other")
        if dropped:
            engine.drop_adapter(1)
        assert [ask(engine, lora) for _ in range(3)] == [0, 0, 0]
        again = LoRARequest("A", 2, lora.lora_path)
        assert [ask(engine, again) for _ in range(2)] == [0, REUSED]
    with running(tmp_path / "disk") as engine:
        assert ask(engine, lora) == REUSED


def test_files_reloaded_in_place_define_the_adapter_from_then_on(tmp_path: Path) -> None:
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"first"))
    with running(tmp_path / "disk") as engine:
        assert [ask(engine, lora) for _ in range(2)] == [0, REUSED]
        train(tmp_path / "adapter", b"other")
        reloading = LoRARequest("A", 1, lora.lora_path, load_inplace=True)
        assert ask(engine, reloading) == 0
        assert ask(engine, lora) == REUSED


def test_a_request_whose_adapter_is_replaced_while_it_runs_stores_no_more(tmp_path: Path) -> None:
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"first"))
    with running(tmp_path / "disk") as engine:
        engine.add(DOCUMENT, 9, "old", lora=lora)
        engine.step()
        train(tmp_path / "adapter", b"other")
        engine.add(DOCUMENT[::-1], 1, "new", lora=LoRARequest("A", 1, lora.lora_path, load_inplace=True))
        engine.abort("new")
        engine.run()
        stored = engine.half.stats()
        assert ask(engine, lora) == 0
        assert engine.half.stats()["tiers"] == stored["tiers"]


def test_reload_that_never_ran_leaves_the_adapter_id_without_reuse(tmp_path: Path) -> None:
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"first"))
    with running(tmp_path / "disk") as engine:
        assert ask(engine, lora) == 0
        train(tmp_path / "adapter", b"other")
        engine.abort(engine.add(DOCUMENT, 1, lora=LoRARequest("A", 1, lora.lora_path, load_inplace=True)))
        engine.run()
        assert [ask(engine, lora) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "lora",
    [
        LoRARequest("A", 1, "org/adapter-on-a-hub"),
        LoRARequest("A", 1, "/no/such/folder"),
        LoRARequest("A", 1, ""),
        LoRARequest("A", 1, "FOLDER", tensorizer_config_dict={"uri": "s3"}),
        LoRARequest("A", 1, "EMPTY"),
    ],
    ids=["hub", "missing", "no path", "tensorizer", "empty"],
)
def test_adapter_with_unreadable_files_is_logged_and_not_reused(
    tmp_path: Path, lora: LoRARequest, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "FOLDER", b"weights")
    (tmp_path / "EMPTY").mkdir()
    if lora.lora_path.isupper():
        lora = LoRARequest("A", 1, str(tmp_path / lora.lora_path), False, lora.tensorizer_config_dict)
    adapters = Adapters()
    assert adapters.of(lora) is None
    assert adapters.of(lora) is None
    (line,) = caplog.messages
    assert "neither reused nor stored" in line


def test_touched_files_of_the_same_content_are_the_same_adapter(tmp_path: Path) -> None:
    lora = LoRARequest("A", 1, train(tmp_path / "adapter", b"weights"))
    adapters = Adapters()
    first = adapters.of(lora)
    os.utime(tmp_path / "adapter" / "adapter_model.safetensors", (1, 1))
    assert adapters.of(lora) == first
    train(tmp_path / "adapter", b"weights")
    assert adapters.of(lora) == first


def test_offloading_tier_distinguishes_adapters_by_their_files(tmp_path: Path) -> None:
    one, two = (Path(train(tmp_path / name, name.encode())) for name in ("one", "two"))
    assert adapters_digest([one, two]) == adapters_digest([two, one]) != adapters_digest([one])
    assert adapters_digest([]) == ""
    with pytest.raises(ConfigError, match=r"adapters: .*gone is not a folder with readable adapter files"):
        adapters_digest([tmp_path / "gone"])
