"""Tests of configuration files: what they mean, and one clear error for each invalid file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support import lanes
from tierstore.config import StoreConfig, config_schema, load_config, parse_seconds, parse_size
from tierstore.errors import ConfigError
from tierstore.types import format_size

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def loaded(folder: Path, text: str) -> StoreConfig:
    file = folder / "store.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text)
    message = str(caught.value)
    assert message.startswith(str(folder / "store.yaml"))
    assert "\n" not in message
    return message


def test_shipped_configurations_are_listed() -> None:
    assert [file.stem for file in CONFIGS] == ["engine", "h100", "small", "workstation"]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_each_shipped_file_loads_and_fits_the_schema(file: Path) -> None:
    config = load_config(file)
    assert config.hbm is not None
    assert config.host is not None
    assert config.nvme is not None
    jsonschema.validate(yaml.safe_load(file.read_text(encoding="utf-8")), config_schema())


def test_the_small_file_needs_no_gpu_and_fits_a_laptop() -> None:
    config = load_config(CONFIGS[2])
    assert config.hbm is not None
    assert config.host is not None
    assert config.nvme is not None
    assert config.hbm.device == "cpu"
    assert (config.hbm.capacity or 0) + config.host.capacity <= 1 << 30
    assert config.nvme.capacity <= 4 << 30


def test_only_capacity_device_and_path_are_required_and_the_rest_has_defaults(tmp_path: Path) -> None:
    text = "hbm: {capacity: 1MiB, device: cpu}\nhost: {capacity: 2MiB}\nnvme: {path: /d, capacity: 3MiB}\nprefetch: {}"
    assert loaded(tmp_path, text).effective() == {
        "hbm": {"capacity": 1 << 20, "device": "cpu", "policy": "lru", "owner": "store"},
        "host": {"capacity": 2 << 20, "pin": "auto", "policy": "lru", "codec": "none"},
        "nvme": {
            "path": "/d",
            "capacity": 3 << 20,
            "codec": "none",
            "payload": "auto",
            "admission": "all",
            "flush": 0.2,
            "timeout": 10.0,
            "readers": "auto",
            "policy": "lru",
            "read_only": False,
        },
        "prefetch": {"max_in_flight": 2 << 30, "share_of_host": 0.25},
    }


@pytest.mark.parametrize("admission", ["all", "second_hit", "cost"])
def test_admission_and_a_budget_of_writes_are_read(tmp_path: Path, admission: str) -> None:
    text = f"nvme: {{path: /d, capacity: 3MiB, admission: {admission}, daily_writes: 2TB}}"
    nvme = loaded(tmp_path, text).nvme
    assert nvme is not None
    assert (nvme.admission, nvme.daily_writes) == (admission, 2 * 1000**4)


def test_omitted_section_is_none() -> None:
    config = load_config({})
    assert (config.page_size, config.hbm, config.host, config.nvme, config.prefetch) == (None,) * 5
    assert config.effective() == {}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_effective_configuration_loads_again_as_the_same(file: Path) -> None:
    config = load_config(file)
    assert load_config(config.effective()) == config


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config({"host": {"capacity": 4096}})
    assert config.host is not None
    for name in ("capacity", "codec", "unknown"):
        with pytest.raises(ValidationError):
            setattr(config.host, name, 1)


def test_an_engine_brings_its_own_memory(tmp_path: Path) -> None:
    config = loaded(tmp_path, "hbm: {device: cuda:0, owner: engine}")
    assert config.hbm is not None
    assert config.hbm.capacity is None
    assert "hbm.capacity is missing" in refusal(tmp_path, "hbm: {device: cuda:0}")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("1e9", 10**9),
        ("1.5e9", 1_500_000_000),
        ("10GB", 10**10),
        ("24GiB", 24 << 30),
        ("24 gib", 24 << 30),
        ("0.5MiB", 1 << 19),
        ("1TiB", 1 << 40),
        ("7EiB", 7 << 60),
        ("8EB", 8 * 10**18),
        ("7B", 7),
    ],
)
def test_sizes_are_bytes_in_units_of_1000_or_1024(tmp_path: Path, text: str, nbytes: int) -> None:
    for written in (text, f'"{text}"'):
        config = loaded(tmp_path, f"host: {{capacity: {written}}}")
        assert config.host is not None
        assert config.host.capacity == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "-1GiB",
        "0GiB",
        "0.1",
        "1GiB5",
        "GiB",
        "1XB",
        "1Gb it",
        "1e400",
        "9EiB",
        "8EiB",
        "8388608TiB",
        "nan",
        ".inf",
        "''",
        "~",
        "on",
        "off",
        "yes",
        "true",
        "010",
        "0x10",
        "1:30",
        "1_000",
        "1,5GB",
        "2001-01-01",
        "[1]",
        "{a: 1}",
        "!!binary aGk=",
    ],
)
def test_an_impossible_size_is_refused(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, f"host:\n  capacity: {text}")
    assert "host.capacity is" in message
    assert '"24GiB"' in message


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("2 S", 2.0), ("500us", 0.0005), ("1min", 60.0)]
)
def test_a_duration_is_read_with_its_unit(tmp_path: Path, text: str, seconds: float) -> None:
    config = loaded(tmp_path, f"nvme: {{path: d, capacity: 1GiB, flush: {text}}}")
    assert config.nvme is not None
    assert config.nvme.flush == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0", "-1", "0ms", "1e9", "2h", "soon", "true", "1:30", "nan", "[2]"])
def test_an_impossible_time_is_refused(tmp_path: Path, text: str) -> None:
    assert "nvme.flush is" in refusal(tmp_path, f"nvme: {{path: d, capacity: 1GiB, flush: {text}}}")


def test_a_duration_without_a_unit_is_refused_in_a_file_and_is_seconds_in_a_mapping(tmp_path: Path) -> None:
    message = refusal(tmp_path, "nvme: {path: d, capacity: 1GiB, flush: 200}")
    assert "nvme.flush is '200'" in message
    assert "did you mean '200ms' or '200s'?" in message
    config = load_config({"nvme": {"path": "d", "capacity": 4096, "flush": 2, "timeout": 0.5}})
    assert config.nvme is not None
    assert (config.nvme.flush, config.nvme.timeout) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("2Gi", "'2GiB'?"),
        ("2G", "'2GB' or '2GiB'?"),
        ("1.5m", "'1.5MB' or '1.5MiB'?"),
        ("2 Gibibytes", "'2GiB'?"),
    ],
)
def test_a_shortened_unit_is_refused_with_the_units_it_could_mean(
    tmp_path: Path, written: str, guess: str
) -> None:
    assert f"did you mean {guess}" in refusal(tmp_path, f"host: {{capacity: {written}}}")


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("policy: LRU", "'lru'?"),
        ("policy: lur", "'lru'?"),
        ("codec: FP8", "'fp8'?"),
        ("pin: Always", "'always'?"),
    ],
)
def test_misspelt_value_is_refused_naming_the_nearest_one(tmp_path: Path, written: str, guess: str) -> None:
    assert f"did you mean {guess}" in refusal(tmp_path, f"host: {{capacity: 1GiB, {written}}}")


@pytest.mark.parametrize(
    ("section", "guess"),
    [
        ("nvme: {path: d, capacity: 1GiB, flush: 200 msec}", "'200ms'?"),
        ("nvme: {path: d, capacity: 1GiB, timeout: 10 seconds}", "'10s'?"),
        ("nvme: {path: d, capacity: 1GiB, timeout: 1m}", "'1ms' or '1min'?"),
        ("nvme: {path: d, capacity: 1GiB, readers: Auto}", "'auto'?"),
        ("nvme: {path: d, capacity: 1GiB, read_only: yes}", "true?"),
        ("nvme: {path: d, capacity: 1GiB, read_only: off}", "false?"),
        ("hbm: {capacity: 1GiB, device: CUDA}", "'cuda'?"),
        ("hbm: {capacity: 1GiB, device: gpu:1}", "'cuda:1'?"),
    ],
)
def test_another_spelling_of_a_value_is_refused_with_the_one_to_write(
    tmp_path: Path, section: str, guess: str
) -> None:
    assert f"did you mean {guess}" in refusal(tmp_path, section)


@pytest.mark.parametrize("path", ["$HOME/tier", "$(pwd)/tier", "${HOME}/tier", "/data/$USER/tier"])
def test_a_path_with_a_shell_variable_is_refused(tmp_path: Path, path: str) -> None:
    message = refusal(tmp_path, f"nvme: {{path: '{path}', capacity: 1GiB}}")
    assert f"nvme.path is '{path}'" in message
    assert "variables, which are not expanded" in message


def test_a_dollar_within_a_name_is_kept() -> None:
    config = load_config({"nvme": {"path": "/data/a$b", "capacity": 4096}})
    assert config.nvme is not None
    assert config.nvme.path == Path("/data/a$b")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hosst: {capacity: 1GiB}", ["hosst", "did you mean host?", "page_size, hbm, host, nvme, prefetch"]),
        ("host: {capacity: 1GiB, polcy: lru}", ["host.polcy", "'lru'", "did you mean host.policy?"]),
        ("nvme: {path: d, capacity: 1GiB, zzz: 7}", ["nvme.zzz", "'7'", "path, capacity, codec, payload"]),
        ("7: 8", ["7", "'8'", "page_size"]),
        ("HOST: {capacity: 1GiB}", ["HOST", "did you mean host?"]),
        ("host: {Capacity: 1GiB}", ["host.Capacity", "did you mean host.capacity?"]),
        ('"a\\nb\\e[31m": 1', [r"'a\nb\x1b[31m' (with value '1') is not a key"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert all(part in message for part in parts)


@pytest.mark.parametrize("name", ["lfu", "slru", "s3-fifo", "w-tinylfu"])
@pytest.mark.parametrize("tier", ["hbm", "host", "nvme"])
def test_withdrawn_eviction_policy_is_refused_naming_its_successor(
    tmp_path: Path, tier: str, name: str
) -> None:
    rest = {"hbm": "device: cpu", "host": "pin: never", "nvme": f"path: {tmp_path}"}[tier]
    message = refusal(tmp_path, f"{tier}: {{capacity: 1GiB, {rest}, policy: {name}}}")
    assert f"{tier}.policy is '{name}'" in message
    assert "no longer has; use 'adaptive' instead" in message


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("hbm: {capacity: 1GiB}", "hbm.device is missing", "'cuda:N'"),
        ("hbm: {capacity: 1GiB, device: gpu}", "hbm.device is 'gpu'", "'cuda:N'"),
        ("hbm: {capacity: 1GiB, device: 'cuda:-1'}", "hbm.device is 'cuda:-1'", "'cuda:N'"),
        (
            "hbm: {capacity: 1GiB, device: cpu, policy: LRU}",
            "hbm.policy is 'LRU'",
            "'lru', 'fifo', 'priority', 'gdsf', 'session' or 'adaptive'",
        ),
        ("hbm: {capacity: 1GiB, device: cpu, owner: me}", "hbm.owner is 'me'", "'store' or 'engine'"),
        ("host: {}", "host.capacity is missing", "24GiB"),
        ("host: {capacity: 1GiB, pin: yes}", "host.pin is 'yes'", "'auto', 'always' or 'never'"),
        ("nvme: {capacity: 1GiB}", "nvme.path is missing", "a directory"),
        ("nvme: {path: , capacity: 1GiB}", "nvme.path is ''", "a directory"),
        ("nvme: {path: [a], capacity: 1GiB}", "nvme.path is ['a']", "a directory"),
        ("nvme: {path: null, capacity: 1GiB}", "nvme.path is 'null'", "a directory"),
        ("nvme: {path: ~, capacity: 1GiB}", "nvme.path is '~'", "a directory"),
        (
            "nvme: {path: ~no-such-user/x, capacity: 1GiB}",
            "nvme.path is",
            "~user names a user of this machine",
        ),
        ("page_size: 0", "page_size is '0'", "whole number"),
        ("page_size: 1.5", "page_size is '1.5'", "whole number"),
        ("page_size: true", "page_size is 'true'", "whole number"),
        ("prefetch: {share_of_host: 0}", "prefetch.share_of_host is '0'", "up to 1"),
        ("prefetch: {share_of_host: 1.1}", "prefetch.share_of_host is '1.1'", "up to 1"),
        ("host:", "host is ''", "a mapping with capacity"),
        ("host: off", "host is 'off'", "a mapping with capacity"),
        ("host: [1]", "host is ['1']", "a mapping with capacity"),
    ],
)
def test_invalid_value_is_refused_with_the_allowed_ones(
    tmp_path: Path, text: str, key: str, allowed: str
) -> None:
    message = refusal(tmp_path, text)
    assert key in message
    assert allowed in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("host: {capacity: 1GiB, codec: exp}", "host.codec is 'exp'"),
        ("nvme: {path: d, capacity: 1GiB, codec: int2}", "nvme.codec is 'int2'"),
        ("nvme: {path: d, capacity: 1GiB, payload: files}", "nvme.payload is 'files'"),
        ("nvme: {path: d, capacity: 1GiB, admission: third_hit}", "nvme.admission is 'third_hit'"),
    ],
)
def test_a_value_that_this_version_does_not_know_is_refused(tmp_path: Path, text: str, key: str) -> None:
    message = refusal(tmp_path, text)
    assert key in message
    assert "but must be 'none'" in message or "but must be 'a" in message


def test_every_fault_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "page_size: 0\nhost: {capacity: 0}\nnvme: {}")
    assert all(
        key in message for key in ("page_size is", "host.capacity is", "nvme.path is", "nvme.capacity is")
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("host: {capacity: 1GiB}\nhost: {capacity: 2GiB}", "line 2: host is given twice"),
        ("host:\n  capacity: 1GiB\n  capacity: 2GiB", "line 3: capacity is given twice"),
        ("host: [", "line 1"),
        ("host:\n\tcapacity: 1", "line 2"),
        ("a: 1\n---\nb: 2", "another document"),
        ("- host", "it contains ['host']"),
        ("", "it is empty"),
        ("just words", "it contains 'just words'"),
        ("? [a]\n: 1", "line 1"),
        ("&a {host: *a}", "line 1"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_non_mapping_of_sections_is_refused(tmp_path: Path, text: str, named: str) -> None:
    assert named in refusal(tmp_path, text)


def test_a_file_cannot_make_the_loader_run_anything(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    refusal(tmp_path, f"host: !!python/object/apply:os.mkdir ['{planted}']")
    assert not planted.exists()


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for source, named in ((tmp_path, "directory"), (tmp_path / "none.yaml", "No such file")):
        with pytest.raises(ConfigError, match=named) as caught:
            load_config(source)
        assert str(source) in str(caught.value)
    (tmp_path / "latin.yaml").write_bytes(b"host: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: .*it is not UTF-8"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_invalid_path_of_a_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"the configuration must be the path of a YAML file, got"):
        load_config(name)
    with pytest.raises(ConfigError, match=r"nvme\.path is .*, but must be the path of a directory"):
        load_config({"nvme": {"path": name, "capacity": "1GiB"}})


def test_a_value_too_long_to_be_written_is_refused_like_any_other() -> None:
    many = 10**5000
    tree = {
        "page_size": many,
        "host": {"capacity": many},
        "nvme": {"path": "d", "capacity": 1, "readers": many},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    for key in ("page_size", "host.capacity", "nvme.readers"):
        assert f"{key} is an integer of thousands of digits, but must be " in str(caught.value)
    with pytest.raises(ConfigError, match="is not a key"):
        load_config({many: 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"'\\ud800' is not a key of host, and is not valid Unicode text"):
        load_config({"host": {"\ud800": 1}})


def test_yaml_alias_bomb_is_refused_with_a_short_message(tmp_path: Path) -> None:
    shared = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 100)}]\n" for n in range(1, 12))
    message = refusal(tmp_path, f"a0: &a0 [{', '.join('x' * 100)}]\n{shared}host: *a11")
    assert "host is [[[" in message
    assert len(message) < 4000


def test_a_mapping_is_checked_like_a_file() -> None:
    config = load_config({"nvme": {"path": Path("d"), "capacity": 1 << 30}, "host": None})
    assert config.nvme is not None
    assert config.host is None
    bad: list[dict[Any, Any]] = [
        {1: 2},
        {"host": {"capacity": True}},
        {"nvme": {"path": b"d", "capacity": 1}},
    ]
    for mapping in bad:
        with pytest.raises(ConfigError, match=r"is not a key|but must be"):
            load_config(mapping)


def test_a_relative_path_starts_at_the_current_directory_and_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config({"nvme": {"path": "a/../data", "capacity": 4096}})
    monkeypatch.chdir("/")
    assert config.nvme is not None
    assert config.nvme.path == tmp_path / "data"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config({"nvme": {"path": "~/data", "capacity": 4096}})
    assert config.nvme is not None
    assert config.nvme.path == tmp_path / "data"


def test_nothing_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_config(CONFIGS[0]).effective()
    for name in ("HOST", "HOST__CAPACITY", "TIERSTORE_HOST_CAPACITY", "CAPACITY", "POLICY"):
        monkeypatch.setenv(name, "fifo")
    assert load_config(CONFIGS[0]).effective() == before


@pytest.mark.parametrize(
    "tree",
    [
        {"hosst": {}},
        {"host": {"capacity": 1, "polcy": "lru"}},
        {"host": {}},
        {"host": {"capacity": 0}},
        {"hbm": {"device": "cpu"}},
        {"hbm": {"capacity": 1, "device": "gpu"}},
        {"host": {"capacity": 1, "codec": "exp"}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(tree: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, config_schema())
    with pytest.raises(ConfigError):
        load_config(tree)


def test_the_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())


@settings(max_examples=lanes.examples(30, 300), deadline=None)
@given(st.text(max_size=12) | st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=4))
def test_a_size_or_time_is_a_number_in_range_or_a_value_error(value: object) -> None:
    for parse, most in ((parse_size, 1 << 63), (parse_seconds, 3600)):
        try:
            number = parse(value)
        except ValueError as error:
            assert str(error).startswith("a ")  # noqa: PT017 - both outcomes are right, each has its rule
        else:
            assert 0 < number <= most


@settings(max_examples=lanes.examples(40, 200), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["page_size", "hbm", "host", "nvme", "capacity", "device", "path", "owner", "x"]
                ),
                inner,
            )
        ),
    )
)
def test_a_mapping_of_anything_gives_a_configuration_or_a_config_error(tree: object) -> None:
    source = tree if isinstance(tree, dict) else {"host": tree}
    try:
        config = load_config(source)
    except ConfigError:
        return
    assert load_config(config.effective()) == config


def test_formatted_sizes_have_few_digits() -> None:
    sizes = [1, 1023, 1024, 1536, 1 << 30, (1 << 40) + (1 << 39), 1 << 60]
    assert [format_size(n) for n in sizes] == [
        "1 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 GiB",
        "1.5 TiB",
        "1024 PiB",
    ]


def test_the_path_may_be_text_or_a_path() -> None:
    assert load_config(str(CONFIGS[0])) == load_config(CONFIGS[0])
