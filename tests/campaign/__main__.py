"""Campaigns against the NVMe tier: kill its process or damage its files many times, and check what is left.

    python -m tests.campaign kill --turns 200 --payload extents
    python -m tests.campaign damage --damages 10000 --payload lmdb

A campaign fails if wrong bytes are served, a process crashes, a synced page is lost, or the capacity is exceeded.
One child process runs at a time. The last line is one JSON object; the exit status is 0 only if nothing went wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.campaign import damage, store_level, tier_level
from tests.campaign.kill import Kills, Level
from tests.campaign.turns import PLANTS

_LEVELS: dict[str, Level] = {"tier": tier_level, "store": store_level}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one campaign. Returns the exit status."""
    args = _parser().parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="tierstore-campaign-"))
    start = monotonic()
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        found = (_kill if args.campaign == "kill" else _damage)(args, seed, folder, bar)
    ok = not found["faults"]
    if ok:
        shutil.rmtree(folder)
    else:
        sys.stderr.write(f"the directory is kept: {folder}\n")
    told = {"campaign": args.campaign, "payload": args.payload, "codec": args.codec, "seed": seed}
    wrong = sum("wrong bytes" in fault for fault in found["faults"])
    summary = {**told, "wrong_bytes": wrong, **found, "seconds": round(monotonic() - start, 1), "ok": ok}
    if not args.json:
        for name, value in summary.items():
            sys.stdout.write(f"{name:>32}  {value}\n")
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if ok else 1


def _kill(args: argparse.Namespace, seed: int, folder: Path, bar: Progress) -> dict[str, Any]:
    kills = Kills(
        _LEVELS[args.level],
        folder,
        payload=args.payload,
        codec=args.codec,
        seed=seed,
        plant=args.plant,
    )
    task = bar.add_task(f"kill, {args.level}, {args.payload}", total=args.turns)
    kills.play(args.turns, lambda done: bar.update(task, completed=done))
    return {"level": args.level, **kills.summary()}


def _damage(args: argparse.Namespace, seed: int, folder: Path, bar: Progress) -> dict[str, Any]:
    task = bar.add_task(f"damage, {args.payload}", total=args.damages)
    campaign = damage.Damages(
        folder, payload=args.payload, codec=args.codec, seed=seed, batch=args.batch, plant=args.plant
    )
    campaign.play(args.damages, lambda done: bar.update(task, completed=done))
    return campaign.summary()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--payload", choices=("lmdb", "extents"), default="lmdb")
    common.add_argument("--codec", choices=("none", "exp"), default="none")
    common.add_argument("--seed", type=int, help="seed of all random choices; by default a new one")
    common.add_argument("--json", action="store_true", help="print only the last line")
    kinds = parser.add_subparsers(dest="campaign", required=True)
    kill = kinds.add_parser("kill", parents=[common])
    kill.add_argument("--turns", type=int, default=200)
    kill.add_argument("--level", choices=tuple(_LEVELS), default="tier")
    kill.add_argument("--plant", choices=("", *PLANTS), default="", help="fault that must be found")
    hurt = kinds.add_parser("damage", parents=[common])
    hurt.add_argument("--damages", type=int, default=10_000)
    hurt.add_argument("--batch", type=int, default=100)
    hurt.add_argument(
        "--plant", choices=("", *damage.PLANTS), default="", help="fault that the campaign must find"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
