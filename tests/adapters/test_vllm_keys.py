"""Test the connector's page keys, and everything that must make two keys differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters import vllm_stub as stub
from tierstore.adapters.model_files import model_digest, weights_digest
from tierstore.adapters.vllm import keys as keys_module
from tierstore.adapters.vllm.keys import KeyChain, identity, namespace, page_keys
from tierstore.types import PageKey


class Hashes:
    def __init__(self, number: int) -> None:
        self.block_hashes = [bytes([i]) * 32 for i in range(number)]


def test_keys_between_two_blocks_are_those_of_the_chain_that_are_full() -> None:
    chain = KeyChain(Hashes(6), namespace("m"))
    assert chain.between(2, 5) == KeyChain(Hashes(6), namespace("m")).first(5)[2:]
    assert chain.between(4, 9) == chain.first(6)[4:]
    assert chain.between(7, 9) == []


def test_keys_follow_the_hashes_of_whole_blocks_as_they_come() -> None:
    request = Hashes(3)
    keys = KeyChain(request, namespace("model"))
    first = keys.first(9)
    assert len(first) == len(set(first)) == 3
    assert all(len(key) == 36 for key in first)
    request.block_hashes.append(b"more")
    assert keys.first(9)[:3] == first
    assert len(keys.first(9)) == 4
    assert keys.first(2) == first[:2]


def test_a_block_of_several_hashes_has_the_key_of_its_last() -> None:
    fine, coarse = Hashes(7), Hashes(0)
    coarse.block_hashes = fine.block_hashes[1::2]
    assert KeyChain(fine, namespace("m"), 2).first(9) == KeyChain(coarse, namespace("m")).first(9)


def test_pages_that_end_after_the_last_hash_have_no_key() -> None:
    chain = KeyChain(Hashes(3), namespace("m"), 2)
    assert chain.hashes == 3
    assert chain.ending([4, 3, 1]) == chain.ending([3, 1])
    assert chain.ending([4]) == []


def test_equal_hashes_of_two_models_have_no_key_in_common() -> None:
    # F010
    one, other = (KeyChain(Hashes(4), namespace(name)).first(4) for name in ("a", "b"))
    assert not set(one) & set(other)


@pytest.mark.parametrize("nbytes", [16, 32, 33])
def test_block_key_does_not_depend_on_the_batch_it_is_made_in(nbytes: int) -> None:
    hashes = [bytes([i]) * nbytes for i in range(5)]
    name = namespace("model")
    together = page_keys(name, hashes)
    assert together == [key for one in hashes for key in page_keys(name, [one])]
    assert len(set(together)) == len(hashes)
    assert {len(key) for key in together} == {36}
    assert not set(together) & set(page_keys(namespace("other"), hashes))


def test_hashes_of_other_lengths_keep_key_length_and_do_not_collide() -> None:
    found = page_keys(namespace("m"), [bytes(32), bytes(31), bytes(33), b"a"])
    assert {len(key) for key in found} == {36}
    assert len(set(found)) == 4


def test_each_hash_of_a_request_is_converted_to_a_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(name: bytes, hashes: Sequence[bytes]) -> list[PageKey]:
        made.extend(hashes)
        return page_keys(name, hashes)

    monkeypatch.setattr(keys_module, "page_keys", counted)
    request = Hashes(6)
    chain = KeyChain(request, namespace("m"), 2)
    for blocks in (1, 0, 9, 3, 9):
        chain.first(blocks)
    request.block_hashes += [b"x" * 32, b"y" * 32]
    assert chain.at(3) is not None
    assert made == request.block_hashes[1::2]


def test_everything_that_changes_kv_changes_the_identity() -> None:
    # F009, F010
    def of(**changes: Any) -> str:
        config = stub.vllm_config({}, changes.pop("ranks", 1))
        for path, value in changes.items():
            section, name = path.split("__")
            setattr(getattr(config, section), name, value)
        return identity(config, "")

    found = [
        of(),
        of(model_config__dtype="float16"),
        of(model_config__quantization="fp8"),
        of(model_config__model="other/name"),
        of(model_config__hf_config=SimpleNamespace(to_dict=dict, _commit_hash="abc")),
        of(cache_config__cache_dtype="fp8"),
        of(cache_config__kv_cache_dtype_skip_layers=["0"]),
        of(cache_config__kv_cache_dtype_skip_layers=["1"]),
        of(load_config__load_format="dummy"),
        of(ranks=2),
        identity(stub.vllm_config({}), "epoch 2"),
        identity(stub.vllm_config({}), "", "int8"),
        identity(stub.vllm_config({}), "", "fp8"),
    ]
    assert len(set(found)) == len(found)
    assert of() == of() == of(cache_config__kv_cache_dtype_skip_layers=[])
    assert of() == identity(stub.vllm_config({}), "", "exact")
    skipped = [of(cache_config__kv_cache_dtype_skip_layers=order) for order in (["0", "2"], ["2", "0"])]
    assert skipped[0] == skipped[1]


def test_weights_are_identified_by_sampled_bytes_and_not_by_folder_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1 << 20) + name[0].encode() * (name == "c"))
    digests = [weights_digest(tmp_path / name) for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "b" / "more.safetensors").write_bytes(b"")
    assert weights_digest(tmp_path / "b") != digests[0]


def test_model_of_the_hub_is_identified_by_its_commit_also_if_another_cache_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = tmp_path / "default", tmp_path / "other"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(default))
    for cache, file in ((default, "config.json"), (other, "model.safetensors")):
        for commit in ("1" * 40, "2" * 40):
            snapshot = cache / "models--org--name" / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / file).write_text("{}")

    def digest(branch: str, commit: str, cache: Path | None) -> str:
        ref = default / "models--org--name" / "refs" / branch
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(commit)
        return model_digest("org/name", branch, None if cache is None else str(cache))

    first = digest("main", "1" * 40, None)
    assert first
    assert digest("main", "1" * 40, other) == first
    assert digest("main", "2" * 40, None) != first
    assert digest("main", "2" * 40, other) != first
    assert digest("branch", "1" * 40, None) == first
    assert model_digest("org/name", "absent") == ""
    assert model_digest("org/absent") == ""


def test_an_object_in_a_models_config_has_the_same_name_in_every_process() -> None:
    def of() -> str:
        config = stub.vllm_config({})
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"x": object(), "y": torch.float16})
        return identity(config, "")

    assert of() == of()
    assert "torch.float16" in of()
