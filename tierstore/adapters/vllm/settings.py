"""What the connector's extra configuration says, and what of it each rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from tierstore.config import HbmConfig, load_config
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.config import StoreConfig

Load = Literal["always", "if_faster"]
_KNOWN = ("config", "layout", "load", "load_timeout_s", "model_id", "put_off_s")
_LOADS: tuple[Load, ...] = ("always", "if_faster")
_LOSSLESS = {"host.codec": ("none",), "nvme.codec": ("none", "exp")}
LOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Settings:
    """``config``: the tiers. ``layout``: the KV layout asked of vLLM, None: the connector's choice.

    ``load``: whether what is quicker to compute is loaded from disk all the same while nobody else wants the engine.
    ``load_timeout_s``: a request whose pages are not there by then computes the rest. ``model_id``: names the weights
    beyond what their files say; change it when they change in place. ``put_off_s``: so long a request waits in vLLM's
    queue, without blocks, for what comes up from disk; 0: its load begins at once.
    """

    config: StoreConfig
    layout: str | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S
    model_id: str = ""
    put_off_s: float = 0.0
    load: Load = "if_faster"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """From vLLM's ``kv_connector_extra_config``; ConfigError names key, value and what is allowed."""
        for key in extra:
            if key not in _KNOWN:
                near = get_close_matches(key, _KNOWN, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown key {key!r} in kv_connector_extra_config{meant} allowed: {', '.join(_KNOWN)}"
                )
        source = extra.get("config")
        if not isinstance(source, str | PathLike | Mapping):
            raise ConfigError(
                f"config is {source!r}; allowed: the path of a YAML file, or its content as a mapping"
            )
        timeout, put_off = extra.get("load_timeout_s", LOAD_TIMEOUT_S), extra.get("put_off_s", 0)
        if not _are_seconds(timeout) or not timeout:
            raise ConfigError(f"load_timeout_s is {timeout!r}; allowed: seconds above 0, up to 3600")
        if not _are_seconds(put_off):
            raise ConfigError(f"put_off_s is {put_off!r}; allowed: seconds from 0 to 3600")
        for key in ("layout", "model_id"):
            if not isinstance(extra.get(key, ""), str | None):
                raise ConfigError(f"{key} is {extra[key]!r}; allowed: a string")
        load = extra.get("load", "if_faster")
        if load not in _LOADS:
            raise ConfigError(f"load is {load!r}; allowed: {', '.join(_LOADS)}")
        return cls(
            _for_engine(load_config(source)),
            extra.get("layout"),
            float(timeout),
            extra.get("model_id") or "",
            float(put_off),
            load,
        )

    def of_rank(self, world_size: int, replica: int | None, device: str) -> StoreConfig:
        """The tiers of one rank: its share of all capacities, its device, a directory of its own engine's.

        ``replica``: the number of this engine where several serve one model, each with a scheduler (data parallel).
        """
        config = self.config
        changes: dict[str, object] = {"hbm": HbmConfig(device=device, owner="engine")}
        if config.host is not None:
            changes["host"] = config.host.model_copy(update={"capacity": config.host.capacity // world_size})
        if config.nvme is not None:
            changes["nvme"] = config.nvme.model_copy(
                update={
                    "path": _path_of(config.nvme.path, replica),
                    "capacity": config.nvme.capacity // world_size,
                    "daily_writes": config.nvme.daily_writes and config.nvme.daily_writes // world_size,
                }
            )
        return config.model_copy(update=changes)


def _are_seconds(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= 3600


def _path_of(path: Path, replica: int | None) -> Path:
    return path if replica is None else path / f"engine-{replica}"


def _for_engine(config: StoreConfig) -> StoreConfig:
    if config.hbm is not None and config.hbm.owner == "store":
        raise ConfigError(
            "hbm.owner is 'store'; allowed under vLLM, which owns HBM: 'engine', or no hbm section"
        )
    if config.host is None:
        raise ConfigError("host is missing; allowed under vLLM: a host section with a capacity")
    codecs = {
        "host.codec": config.host.codec,
        "nvme.codec": "none" if config.nvme is None else config.nvme.codec,
    }
    for name, codec in codecs.items():
        if codec not in _LOSSLESS[name]:
            allowed = ", ".join(_LOSSLESS[name])
            raise ConfigError(
                f"{name} is {codec!r}; allowed under vLLM, whose pages are stored byte by byte: {allowed}"
            )
    return config
