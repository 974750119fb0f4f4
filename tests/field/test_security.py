"""Tests that files in a store's directory are never executed or open to others, and that tenants are separate."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierstore
from tests.support import forked
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, read, tiers, where, write
from tierstore.errors import ConfigError
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

TOKENS = list(range(16))

PLANTED = """
import json, os, pickle, sys
from pathlib import Path

import lmdb
from tests.support.pages import SPEC, chain, read_soon, tiers, write
from tierstore.nvme import record_format
from tierstore.errors import ConfigError
from tierstore.nvme import catalogue_entry as entry
from tierstore.nvme.inspection import inspect, purge, verify
from tierstore.store import TierStore

class Bomb:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

bomb, keys, seen = pickle.dumps(Bomb()), chain(4), []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith("pickle.") else None)

def plant_in_lmdb(directory, name, length):
    with lmdb.open(str(directory), map_size=1 << 26, max_dbs=entry.MAX_DBS) as env:
        with env.begin(write=True) as txn:
            for key in keys:
                txn.put(key, bomb.ljust(length, b"."), db=env.open_db(name, txn))
                if name == entry.PAGES_DB:  # to be read through LMDB, not where the old value was
                    raw = entry.pack(key, entry.Entry(None, 8192, SPEC.page_nbytes, 0))
                    txn.put(key, raw, db=env.open_db(entry.CATALOGUE_DB, txn))

def plant(home, directory, where):
    if where == "value":
        plant_in_lmdb(directory, entry.PAGES_DB, record_format.record_nbytes(SPEC.page_nbytes))
    elif where == "entry":
        plant_in_lmdb(directory, entry.CATALOGUE_DB, entry.ENTRY_NBYTES)
    elif where == "meta":
        plant_in_lmdb(directory, entry.META_DB, len(bomb))
    elif where == "head":
        data = directory / "data.mdb"
        data.write_bytes(data.read_bytes().replace(b"TierPage", bomb[:8]))
    elif where == "strays":
        for name in ("index.pkl", "metadata.json", "cache.db", "__init__.py", "conftest.py", "pickle.py"):
            for place in (home, directory):
                (place / name).write_bytes(bomb)
    else:
        (directory if where == "tierstore-shard.json" else home).joinpath(where).write_bytes(bomb)

def use(home):
    try:
        with TierStore.open(tiers(8, 8, home), SPEC) as store:
            found = read_soon(store, keys)
            write(store, chain(2, "new"))
            store.flush()
        inspect(home), verify(home), purge(home, "damaged")
    except ConfigError:
        return "refused"
    return found

outcomes = {}
for where in ("value", "entry", "meta", "head", "strays", "tierstore-shard.json", "tierstore-home.json"):
    home = Path(sys.argv[1]) / where
    with TierStore.open(tiers(8, 8, home), SPEC) as store:
        write(store, keys)
    plant(home, next(home.glob("*-0")), where)
    outcomes[where] = use(home)
loaded = list(seen)
went_off_early = os.path.exists(sys.argv[2])
pickle.loads(bomb)
print(json.dumps([outcomes, loaded, went_off_early, os.path.exists(sys.argv[2]), "pickle.find_class" in seen]))
"""


def test_pickles_planted_anywhere_in_the_directory_are_never_loaded(tmp_path: Path) -> None:
    # F105: as values, entries, metadata, headers, markers and stray files. An audit hook records each unpickling.
    child = forked.run(PLANTED, tmp_path, tmp_path / "bomb-went-off")
    assert child.returncode == 0, child.stderr
    outcomes, loaded, went_off_early, was_real, hook_works = json.loads(child.stdout.splitlines()[-1])
    assert outcomes == {
        "value": 0,
        "entry": 0,
        "meta": 4,
        "head": 0,
        "strays": 4,
        "tierstore-shard.json": 0,
        "tierstore-home.json": 4,
    }
    assert (loaded, went_off_early) == ([], False)
    assert was_real
    assert hook_works


def test_no_module_of_the_library_imports_what_executes_data() -> None:
    # F105
    forbidden = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "diskcache"}
    calls, attributes = {"eval", "exec"}, {"torch.load", "torch.save", "np.load", "np.save"}
    found: list[str] = []
    for path in Path(tierstore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                found.append(f"{path.name}: {node.func.id}")
            elif (
                isinstance(node, ast.Attribute)
                and node.attr in ("load", "save")  # ast.unparse is slow
                and ast.unparse(node) in attributes
            ):
                found.append(f"{path.name}: {ast.unparse(node)}")
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in forbidden]
    assert found == []


def test_group_and_world_write_access_is_removed_at_open(tmp_path: Path) -> None:
    # F105: data can only be planted in a directory that others can write to
    config = tiers(4, 4, tmp_path / "disk")
    with TierStore.open(config, SPEC) as store:
        keys = store.keys(TOKENS)
        write(store, keys)
    directory = next((tmp_path / "disk").glob("*-0"))
    directory.chmod(0o777)
    with TierStore.open(config, SPEC) as store:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert read(store, keys) == 4


def test_a_link_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    # F105
    config = tiers(4, 4, tmp_path / "disk")
    TierStore.open(config, SPEC).close()
    directory = next((tmp_path / "disk").glob("*-0"))
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a symbolic link"):
        TierStore.open(config, SPEC)


# -- F106: tenants ----------------------------------------------------------------------------------------------

A, B = b"tenant-a", b"tenant-b"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(8, 8, tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def hold_only_in(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    write(store, keys)
    store.flush()
    for other in {Tier.HBM, Tier.HOST, Tier.NVME} - {tier}:
        store.evict(keys, other)
    assert [set(where(store, key)) for key in keys] == [{tier}] * len(keys)


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_a_tenant_that_probes_anothers_prefix_gets_nothing_in_any_tier(bench: Bench, tier: Tier) -> None:
    # F106: the hits, tiers, reason and explanations are the same as for tokens that were never put
    store = bench.store
    hold_only_in(store, store.keys(TOKENS, salt=A), tier)
    never = store.keys([99, *TOKENS[1:]], salt=B)
    for salt in (B, b"", A + b"\0", A[:-1], b"tenant-A"):
        probe = store.keys(TOKENS, salt=salt)
        told: list[tuple[object, ...]] = []
        for keys in (probe, never):
            with store.acquire(keys) as lease:
                answer = (lease.wait(0.0), lease.num_pages, lease.tiers, lease.missing_because)
            pages = store.explain(keys)
            told.append((*answer, [{k: v for k, v in page.items() if k != "key"} for page in pages]))
        assert told[0] == told[1]
        assert told[0][:4] == (LeaseState.READY, 0, [], "not_found")
        assert store.match(probe).num_pages == 0
    assert read(store, store.keys(TOKENS, salt=A)) == 4


@pytest.mark.parametrize("length", [4, 8, 12, 16])
def test_probe_of_any_length_starts_no_copy_and_counts_only_as_misses(bench: Bench, length: int) -> None:
    # F106: the response time could reveal a hit, so a probe must not start any work that a hit starts
    store = bench.store
    hold_only_in(store, store.keys(TOKENS, salt=A), Tier.NVME)
    before = store.metrics.snapshot()
    store.acquire(store.keys(TOKENS[:length], salt=B)).release()
    after = store.metrics.snapshot()
    assert store.stats()["in_flight"] == {}
    for name in ("hits_pages", "transfer_bytes", "failed_pages"):
        assert before[name] == after[name]
    assert sum(after["misses_pages"].values()) - sum(before["misses_pages"].values()) == length // 4


def test_the_tenant_is_part_of_the_key_from_the_first_token_on_and_cannot_be_forged_by_other_terms(
    bench: Bench,
) -> None:
    # F106: a tenant's choice of tokens, adapters and images never results in another tenant's key
    store = bench.store
    mine = store.keys(TOKENS, salt=A)
    forged = [
        store.keys(TOKENS, salt=b"", extra=(A,)),
        store.keys(TOKENS, salt=b"", extra=(A.decode(),)),
        store.keys(TOKENS, salt=b"", extra=((0, A),)),
        store.keys(TOKENS, salt=B, extra=(A, (0, A))),
        store.keys([*A, *TOKENS], salt=b""),
        store.keys(TOKENS, salt=A, extra=(b"",)),
        store.keys(TOKENS, salt=A, extra=((0, b""),)),
    ]
    assert not set(mine) & {key for keys in forged for key in keys}


def test_equal_tenants_share_their_prefix_after_a_restart_and_others_still_do_not(tmp_path: Path) -> None:
    # F106: the opposite case, for comparison
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, store.keys(TOKENS, salt=A))
    with TierStore.open(config, SPEC) as store:
        assert store.match(store.keys(TOKENS, salt=B)).num_pages == 0
        assert read(store, store.keys(TOKENS, salt=A)) == 4
        assert store.drain(PATIENCE_S)
