"""Runs all commands on tiny inputs, and collects their exit codes and the keys in their ``--json`` output."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.golden import directories
from tests.golden.command import run, told
from tests.golden.trees import Tree, load, shape
from tests.support.models import GQA
from tests.support.traces import chats, mooncake

BENCH: dict[str, str] = {
    "copy": "--device cpu --pieces 4KiB --batch 64KiB --contiguous 32KiB --pairs 1",
    "nvme": "--size 64KiB --page-sizes 8KiB --rounds 1 --stall-size 256KiB --idle 0.01 --dir {scratch}",
    "codec": "--synthetic --tokens 64 --page-size 32 --seconds 0",
    "arena": "--device cpu --size 1MiB",
    "attention": "--device cpu --context 96 --page-size 16 --layers 1 --pairs 1 --batches 1 --suffixes 5 --filled 1",
    "overlap": "--device cpu --restored 512KiB --page-size 1 --matrix 16 --rounds 1 --read 64KiB --times 3 --batch 8MiB"
    " --compute 0.5 --layers 16",
    "core": "--pages 8 --put-pages 8 --records 20 --restore-pages 8 --dir {scratch}",
}


def bench(name: str, scratch: Path) -> Tree:
    """Return the keys in the output of a benchmark."""
    return _names(shape(told("bench", name, *BENCH[name].format(scratch=scratch).split())))


def outputs(scratch: Path) -> Tree:
    """Return the keys in the output of all commands except benchmarks."""
    case = directories.CASES[0]
    home, archive = directories.unpack(case, scratch)
    config = directories.config_file(case, home)
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GQA), encoding="utf-8")
    tiers = scratch / "tiers.yaml"
    memory = {"hbm": {"capacity": "64KiB", "device": "cpu"}, "host": {"capacity": "64KiB"}}
    tiers.write_text(yaml.safe_dump({**memory, **yaml.safe_load(config.read_text())}), encoding="utf-8")
    trace = mooncake(scratch / "chats.jsonl", chats(2, 2))
    bounds = scratch / "bounds"
    damaged = _damaged(case, scratch / "damaged")
    some = scratch / "keys.txt"
    some.write_text(f"{_a_key(case)}\n{'00' * 36}\n", encoding="utf-8")
    report = told("export", "--config", config, "--all", scratch / "x.tier")
    elsewhere = directories.config_file(case, scratch / "elsewhere")
    found = {
        "doctor": told("doctor", "--path", scratch),
        "plan": told("plan", "--config", tiers, "--model", model, "--page-size", "4", "--tokens", "16"),
        "replay": told("replay", trace, "--policy", "lru", "--capacity", "1GiB", "--bounds", bounds),
        "inspect": told("inspect", home),
        "verify": told("verify", home),
        "verify, damaged": told("verify", damaged, exit_code=1),
        "export": {**report, "codecs": "by codec"},
        "export, missing": {
            **told("export", "--config", config, "--keys", some, scratch / "x.tier", exit_code=1),
            "codecs": "by codec",
        },
        "import": told("import", "--config", elsewhere, archive),
        "purge": told("purge", home, "--yes"),
        "refusal": told("inspect", scratch, exit_code=2),
    }
    return {name: _names(shape(value)) for name, value in found.items()}


def exit_codes(scratch: Path) -> Tree:
    """Return exit codes: 0 for success, 1 if a command has found something wrong, 2 if it cannot run as asked."""
    case = directories.CASES[0]
    home, archive = directories.unpack(case, scratch)
    config = directories.config_file(case, home)
    strange, empty = scratch / "strange", scratch / "empty"
    strange.mkdir()
    (strange / "somebody's").write_text("file", encoding="utf-8")
    empty.mkdir()
    wrong, no_disk = scratch / "wrong.yaml", scratch / "no-disk.yaml"
    wrong.write_text("hbm: {capacity: much, device: cpu}\n", encoding="utf-8")
    no_disk.write_text("host: {capacity: 1MiB}\n", encoding="utf-8")
    damaged = _damaged(case, scratch / "damaged")
    cut = scratch / "cut.tier"
    cut.write_bytes(archive.read_bytes()[:-1])
    some = scratch / "keys.txt"
    some.write_text(f"{_a_key(case)}\n{'00' * 36}\n", encoding="utf-8")
    out = scratch / "out.tier"
    asked: dict[str, list[str | Path]] = {
        "--version": ["--version"],
        "--help": ["--help"],
        "no command": [],
        "unknown command": ["what"],
        "unknown option": ["inspect", "--what"],
        "missing argument": ["inspect"],
        "value out of range": ["demo", "--questions", "0"],
        "config-schema": ["config-schema"],
        "inspect, sound": ["inspect", home],
        "inspect, nowhere": ["inspect", scratch / "nowhere"],
        "inspect, another's directory": ["inspect", strange],
        "inspect, empty directory": ["inspect", empty],
        "inspect, damaged": ["inspect", damaged],
        "verify, sound": ["verify", home],
        "verify, damaged": ["verify", damaged],
        "verify, nowhere": ["verify", scratch / "nowhere"],
        "export, sound": ["export", "--config", config, "--all", out],
        "export, a page is missing": ["export", "--config", config, "--keys", some, out],
        "export, which pages is not said": ["export", "--config", config, out],
        "export, wrong value in the configuration": ["export", "--config", wrong, "--all", out],
        "export, no nvme section": ["export", "--config", no_disk, "--all", out],
        "export, no configuration": ["export", "--config", scratch / "nowhere.yaml", "--all", out],
        "import, sound": ["import", "--config", config, archive],
        "import, cut": ["import", "--config", config, cut],
        "import, no file": ["import", "--config", config, scratch / "nowhere.tier"],
        "plan, no model": ["plan", "--config", config, "--model", scratch / "nowhere"],
        "replay, no trace": ["replay", scratch / "nowhere.jsonl"],
        "bench nvme, size that is none": ["bench", "nvme", "--size", "much"],
        "serve, no configuration": [
            "serve",
            "--config",
            scratch / "nowhere.yaml",
            "--model",
            scratch / "nowhere",
        ],
        "purge, nobody answers": ["purge", home],
        "purge, no such fingerprint": ["purge", home, "--which", "zz", "--yes"],
        "purge": ["purge", home, "--yes"],
    }
    return {name: run(*words).exit_code for name, words in asked.items()}


def _names(tree: Tree) -> Tree:
    """Return the tree without its values, because a number may be an integer, a float, or null on some machines."""
    return {name: _names(part) for name, part in tree.items()} if isinstance(tree, dict) else "value"


def _a_key(case: directories.Case) -> str:
    """Return the key of a page in the case's directory."""
    key: str = next(iter(load(case.name)["pages"]["trunk"]))
    return key


def _damaged(case: directories.Case, into: Path) -> Path:
    """Return a copy of the case's directory in which one byte of each page is changed."""
    home, _ = directories.unpack(case, into)
    (data,) = home.rglob("data.mdb")
    raw = bytearray(data.read_bytes())
    at = raw.find(b"TierPage")
    while at >= 0:
        raw[at + 4080 + 100] ^= 1
        at = raw.find(b"TierPage", at + 1)
    data.write_bytes(raw)
    return home
