"""The store's state machine runs clean, and finds every bug that is planted."""

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
    max_examples=lanes.examples(12, 120),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
CLEAN = settings(
    QUIET, max_examples=200, stateful_step_count=30, derandomize=True, database=None, phases=[Phase.generate]
)
HUNT = settings(CLEAN, max_examples=1500)
"""As many as it takes: the first failure ends it, and the choices are the same every time."""


class InMemory(StoreMachine):
    """Most bugs need no disk. A store that hangs is not waited for long."""

    shapes: ClassVar[list[Shape]] = [(HOST, None)]
    patience_s = 1.0


class OnDisk(StoreMachine):
    """For bugs of what stays on disk."""

    shapes: ClassVar[list[Shape]] = [(HOST, 200)]
    patience_s = 1.0


class Secretly(SecretMachine):
    """For bugs of pages that must not get there, with HOST and without."""

    shapes: ClassVar[list[Shape]] = [(HOST, 200), (1, 200), (None, 200)]
    patience_s = 1.0


class Sickly(SickMachine):
    """For bugs of reads that hang."""

    patience_s = 1.0


class Admitting(AdmittingMachine):
    """For bugs of what admission keeps from the disk."""

    patience_s = 1.0


class Encoded(SecretMachine):
    """HOST holds pages as int8, the disk as HOST does or compressed as well."""

    shapes: ClassVar[list[Shape]] = [(HOST, None), (HOST, 200), (1, 200), (HOST, 6)]
    host_more: ClassVar[dict[str, object]] = {"codec": "int8"}
    patience_s = 1.0


class EncodedTwice(Encoded):
    """The disk compresses what HOST has encoded."""

    nvme_more: ClassVar[dict[str, object]] = {"codec": "int8+zstd"}


@pytest.mark.parametrize("machine", [Encoded, EncodedTwice])
def test_an_encoded_host_keeps_every_promise_to_the_byte_of_pages_that_its_codec_states(
    machine: type[Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STEADY", "int8")
    run_state_machine_as_test(machine, settings=QUIET)


@pytest.mark.parametrize("machine", [AdmittingMachine, WorthyMachine])
def test_whatever_admission_thinks_what_is_asked_for_is_kept(machine: type[AdmittingMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUIET)


def test_whatever_a_hung_disk_does_late_nobody_waits_and_nothing_is_lost() -> None:
    run_state_machine_as_test(SickMachine, settings=QUIET)


def test_any_order_of_calls_stalls_and_failures_keeps_every_promise() -> None:
    run_state_machine_as_test(SecretMachine, settings=QUIET)


@pytest.mark.deep
@pytest.mark.parametrize("machine", [InMemory, OnDisk, Secretly])
def test_where_nothing_is_planted_nothing_is_found(machine: type[StoreMachine]) -> None:
    # The bugs of secrets are found among the first few: so many are enough.
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
