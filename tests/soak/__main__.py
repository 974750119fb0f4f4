"""Soak test: random clients under faults, kills and damage must not get wrong bytes, hang, or use more and more memory.

    python -m tests.soak --minutes 30

The parent runs one client process after the other on the same directory. Most are killed with SIGKILL at a random
moment; the others close the store. Sometimes the directory is damaged between two clients. Each client first reads back
every page that the store offers. One more client runs as long as the soak, on a separate store. The last line is one
JSON object; the exit status is 0 only if nothing went wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.soak.account import say
from tests.soak.client import KINDS, Role, run
from tests.soak.faults import PROFILES
from tests.soak.parent import soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parent or, with ``--client``, one client. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds for which a client acts")
    parser.add_argument("--seed", type=int, help="seed of all random choices; by default a new one")
    parser.add_argument(
        "--plant", action="store_true", help="let every client serve a wrong byte, so that the soak must fail"
    )
    parser.add_argument("--client", type=Path, metavar="DIR", help="run one client on this directory")
    parser.add_argument("--kind", choices=KINDS, default="own")
    parser.add_argument("--profile", choices=PROFILES, default="none")
    args = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    if args.client is not None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        role = Role(kind=args.kind, profile=args.profile, seed=seed, seconds=args.seconds, plant=args.plant)
        return run(role, args.client)
    summary = soak(args.minutes, args.seconds, seed, plant=args.plant)
    say(**summary)
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
