"""Run the store's state machines, and test that they find every planted bug."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.store.admitting_machine import AdmittingMachine, WorthyMachine
from tests.store.machine import HOST, Shape, StoreMachine
from tests.store.planted import (
    BUGS_IN_MEMORY,
    BUGS_OF_ADMISSION,
    BUGS_OF_ENCODED_MEMORY,
    BUGS_OF_SECRETS,
    BUGS_OF_SICK_DISKS,
    BUGS_ON_DISK,
)
from tests.store.secret_machine import SecretMachine
from tests.store.sick_machine import SickMachine
from tests.support import lanes, pages
from tests.support.planting import Plant, require_noticed

QUIET = settings(
    max_examples=lanes.examples(8, 120),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
CLEAN = settings(
    QUIET, max_examples=200, stateful_step_count=30, derandomize=True, database=None, phases=[Phase.generate]
)
HUNT = settings(CLEAN, max_examples=1500)
"""Settings of a hunt for a planted bug. The first failure ends it. The random choices are the same every time."""


class InMemory(StoreMachine):
    """State machine of a store without a disk. It finds most planted bugs. A call counts as hung after one second."""

    shapes: ClassVar[list[Shape]] = [(HOST, None)]
    patience_s = 1.0


class OnDisk(StoreMachine):
    """State machine of a store with a disk, to find bugs that concern records."""

    shapes: ClassVar[list[Shape]] = [(HOST, 200)]
    patience_s = 1.0


class Secretly(SecretMachine):
    """State machine of stores with and without HOST, to find bugs that write memory-only pages to disk."""

    shapes: ClassVar[list[Shape]] = [(HOST, 200), (1, 200), (None, 200)]
    patience_s = 1.0


class Sickly(SickMachine):
    """State machine of stores whose disk hangs, to find bugs in the handling of late reads."""

    patience_s = 1.0


class Admitting(AdmittingMachine):
    """State machine of stores with an admission policy, to find bugs in admission."""

    patience_s = 1.0


class Encoded(SecretMachine):
    """State machine of stores whose HOST tier encodes pages as int8. The disk, if any, stores these pages unchanged."""

    shapes: ClassVar[list[Shape]] = [(HOST, None), (HOST, 200), (1, 200), (HOST, 6)]
    host_more: ClassVar[dict[str, object]] = {"codec": "int8"}
    patience_s = 1.0


class EncodedTwice(Encoded):
    """State machine of stores whose HOST tier encodes pages as int8. The disk, if any, compresses these pages."""

    nvme_more: ClassVar[dict[str, object]] = {"codec": "int8+zstd"}


@pytest.mark.parametrize("machine", [Encoded, EncodedTwice])
def test_encoded_host_keeps_every_invariant_and_byte_of_representable_pages(
    machine: type[Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STEADY", "int8")
    run_state_machine_as_test(machine, settings=QUIET)


@pytest.mark.parametrize("machine", [AdmittingMachine, WorthyMachine])
def test_pages_requested_to_be_stored_are_kept_regardless_of_admission(
    machine: type[AdmittingMachine],
) -> None:
    run_state_machine_as_test(machine, settings=QUIET)


def test_late_results_of_a_hung_disk_block_no_caller_and_lose_nothing() -> None:
    run_state_machine_as_test(SickMachine, settings=QUIET)


def test_any_order_of_calls_stalls_and_failures_keeps_every_invariant() -> None:
    run_state_machine_as_test(SecretMachine, settings=QUIET)


@pytest.mark.deep
@pytest.mark.parametrize("machine", [InMemory, OnDisk, Secretly])
def test_without_a_planted_bug_nothing_is_found(machine: type[StoreMachine]) -> None:
    # The bugs with memory-only pages are found within the first few examples, so 60 examples are enough.
    examples = 60 if machine is Secretly else CLEAN.max_examples
    run_state_machine_as_test(machine, settings=settings(CLEAN, max_examples=examples))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "machine"),
    [(plant, InMemory) for plant in BUGS_IN_MEMORY]
    + [(plant, OnDisk) for plant in BUGS_ON_DISK]
    + [(plant, Secretly) for plant in BUGS_OF_SECRETS]
    + [(plant, Sickly) for plant in BUGS_OF_SICK_DISKS]
    + [(plant, Admitting) for plant in BUGS_OF_ADMISSION]
    + [(plant, EncodedTwice) for plant in BUGS_OF_ENCODED_MEMORY],
)
def test_a_planted_bug_is_found(
    plant: Plant, machine: type[StoreMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.CRITICAL)
    if issubclass(machine, Encoded):
        monkeypatch.setattr(pages, "STEADY", "int8")
    plant(monkeypatch)
    try:
        require_noticed(machine, HUNT)
    finally:
        logging.disable(logging.NOTSET)
