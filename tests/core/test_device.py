"""Test, without a GPU, that a missing device is refused, and which copy function of the driver is chosen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from tests.support.events import ManualEvent
from tests.support.pages import SPEC
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.gpu.device import CpuDevice, open_device
from tierstore.gpu.driver import batch_call
from tierstore.gpu.engine_pages import EnginePages
from tierstore.page import PageLayout
from tierstore.store import TierStore


def _no_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.version.cuda", None)


def _no_card(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.version.cuda", "13.0")
    patch.setattr("torch.cuda.is_available", lambda: False)


def _two_cards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.version.cuda", "13.0")
    patch.setattr("torch.cuda.is_available", lambda: True)
    patch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (_no_cuda, "'cuda:2', but this torch was built without CUDA; set it to cpu"),
        (_no_card, "'cuda:2', but torch finds no CUDA device; set it to cpu"),
        (_two_cards, "must be one of cpu, cuda:0, cuda:1 on this machine, got 'cuda:2'"),
    ],
)
def test_missing_device_is_refused_with_those_present(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[pytest.MonkeyPatch], None], why: str
) -> None:
    machine(monkeypatch)
    config = load_config({"hbm": {"capacity": "1MiB", "device": "cuda:2"}, "host": {"capacity": "1MiB"}})
    with pytest.raises(ConfigError) as refused:
        TierStore.open(config, SPEC)
    assert why in str(refused.value)


def test_gpu_pages_reach_the_disk_only_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _two_cards(monkeypatch)
    tree = {"hbm": {"capacity": "1MiB", "device": "cuda"}, "nvme": {"path": "unused", "capacity": "1MiB"}}
    with pytest.raises(ConfigError, match="host is missing"):
        TierStore.open(load_config(tree), SPEC)


def test_an_engines_tensors_must_be_on_the_configured_device() -> None:
    elsewhere = torch.empty(2, *SPEC.shape, dtype=torch.float16, device="meta")
    with pytest.raises(
        ConfigError,
        match=r"hbm\.device must be the device of the engine's tensors, got cpu for tensors on meta",
    ):
        open_device("cpu").register(PageLayout.of(SPEC), (EnginePages([elsewhere], "BLKNHD"),))


def test_on_the_cpu_a_use_has_ended_unless_an_event_is_given() -> None:
    event = ManualEvent()
    device = CpuDevice()
    assert device.last_use(None) is None
    assert device.last_use(event) is event


class FakeDriver:
    """A fake of the driver module of cuda-bindings. It can only look up functions."""

    def __init__(self, error: int, address: int) -> None:
        self._answer = (error, address, 0)
        self.asked: list[tuple[bytes, int]] = []

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        self.asked.append((name, version))
        return self._answer


def test_pieces_are_copied_one_by_one_without_batch_support() -> None:
    assert batch_call(object()) is None
    assert batch_call(FakeDriver(1, 0)) is None
    assert batch_call(FakeDriver(0, 0)) is None


def test_a_batch_reaches_the_driver_as_arrays() -> None:
    seen: list[tuple[list[int], int]] = []
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)

    def driver(dst: int, src: int, nbytes: int, count: int, *_: int) -> int:
        array = ctypes.cast(dst, ctypes.POINTER(ctypes.c_int64))
        seen.append((array[:count], count))
        return 0

    function = kind(driver)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    fake = FakeDriver(0, address)
    call = batch_call(fake)
    numbers = (ctypes.c_int64 * 3)(5, 1 << 40, 7)
    at = ctypes.addressof(numbers)
    assert call(at, at, at, 3, None, None, 1, None) == 0
    assert seen == [([5, 1 << 40, 7], 3)]
    assert fake.asked == [(b"cuMemcpyBatchAsync", 13000)]
