"""How much of what waits is launched at once, and how far ahead of the link: by the form in which pages cross it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.codecs.held import Held


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is launched at once. In bytes over the link but for ``pieces`` and ``at_once``."""

    whole: int = 16 << 20
    """Transfers up to this are not cut into layer groups on an idle link."""
    together: int = 128 << 20
    """What several transfers have of a layer group is launched together up to this."""
    pieces: int = 256
    """And up to so many pieces, in one call too; more of one transfer are launched by the thread: they take the driver
    too long."""
    ahead: int = 512 << 20
    """Nothing more is launched while the link has so much to do: some milliseconds. A quarter of it where pages are
    coming that would go first: they wait for what is launched."""
    enough: int = 64 << 20
    """With so much to do the link can wait until there is more of a group to be launched together."""
    behind: int = 256 << 20
    """With less the thread launches what nobody launches: no call came for 10 ms. With less than a quarter of it in any
    case, but where pages are coming: calls do not keep the link busy."""
    at_once: int = 4
    """Launches in one call, at most. Whoever submits makes one: it is to bring what comes next."""


AS_THEY_ARE = Pace()
ENCODED = Pace(pieces=512)
"""Of a group these pages have four pieces where others have one: with as few, a call would launch a quarter."""

MAPPED = Pace(together=512 << 20, ahead=2 << 30, enough=128 << 20, behind=1 << 30, at_once=8)
"""Of encoded pages that need no pieces: a launch is the same work for any number of them. So there are few, and 40 ms
of the link ahead, as whoever launches may have to wait so long for its turn. What comes later waits for them."""


def pace_of(held: Held, pieces: int) -> Pace:
    """For pages that host memory holds so, of which a layer group has so many pieces; 0: their copies need none."""
    if not held.encoded:
        return AS_THEY_ARE
    return ENCODED if pieces else MAPPED
