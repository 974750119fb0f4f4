"""What goes wrong with the read of a page: given its name, counted, and told once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import lmdb

from tierstore.errors import IntegrityError
from tierstore.nvme.acks import Outbox
from tierstore.nvme.record import MovedError, UnfitError
from tierstore.types import Failure, PageKey

_log = logging.getLogger(__name__)


class Mishaps:
    """Of the reader threads. Any thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._told = False

    def guarded(self, key: PageKey, act: Callable[[], None]) -> Failure | None:
        """Do it; what went wrong with the page, counted and told, or None."""
        try:
            act()
        except KeyError:
            failure = Failure.NOT_FOUND
        except UnfitError as error:
            failure = Failure.UNFIT
            self._tell("page %s on disk is none for memory: %s", key, error)
        except IntegrityError as error:
            failure = Failure.INTEGRITY
            self._tell("page %s on disk is not what was written: %s", key, error)
        except (MovedError, lmdb.PanicError):  # the writer opens a catalogue in panic anew
            failure = Failure.UNAVAILABLE
        except lmdb.ReadersFullError as error:
            failure = Failure.UNAVAILABLE
            self._tell(
                "page %s was not read: other programs read the catalogue in all its places: %s", key, error
            )
        except (OSError, lmdb.Error) as error:
            failure = Failure.IO_ERROR
            self._tell("page %s could not be read: %s", key, error)
        except Exception:  # noqa: BLE001  the thread's top: one page fails, the thread goes on
            failure = Failure.IO_ERROR
            _log.exception("reading page %s failed", key.hex())
        else:
            return None
        self._outbox.count(f"read_{failure.value}")
        return failure

    def _tell(self, message: str, key: PageKey, error: Exception) -> None:
        """Warn of the first bad page; a failing disk has thousands, and they are counted."""
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        _log.log(level, message, key.hex(), error)
