"""Reads and edits the arguments of a forward pass, and rejects inputs that pages cannot represent.

Images, unexpected positions or a mask with holes would silently lead to wrong answers. They are rejected with
a ValueError that explains what to do instead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel


def check_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a prompt contains placeholders for images, audio or video."""
    places = placeholders(model.config)
    for name, token in sorted(places.items()):
        if any(token in prompt for prompt in prompts):
            raise ValueError(
                f"the prompt contains token {token} ({name} of {type(model).__name__}), but TierStoreCache keeps "
                "K and V of text only, even with extra=. Run requests with images, audio or video without "
                "TierStoreCache"
            )


def is_text_alone(config: PreTrainedConfig) -> bool:
    """Return whether this is the configuration of a text model, not of a model that contains one."""
    return config.get_text_config(decoder=True) is config


def placeholders(config: PreTrainedConfig) -> dict[str, int]:
    """Return the tokens that stand for images, audio and video, by their names in the configuration.

    The result is empty for a text model.
    """
    if is_text_alone(config):
        return {}
    names = {name for name in config.to_dict() if _PLACEHOLDER.fullmatch(name)}
    found = {name: getattr(config, name) for name in names}
    return {name: token for name, token in found.items() if isinstance(token, int)}


_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_(pad_|latent_|prompt_|patch_)?(token_)?(id|index)")
"""Matches the names of placeholder tokens in configurations of transformers 5."""

_TOKENS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "position_ids",
    }
)
"""Inputs in which tensors are allowed: tokens, inputs checked elsewhere, and inputs that do not affect K/V."""


def checked_inputs(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call, without token types that are all 0 (text).

    Inputs such as images are rejected for two reasons. Page keys depend only on tokens, and different images
    have the same placeholder tokens. Also, the part of a prompt that is not cached may begin within an image.

    Raises:
        ValueError: The model is given images, audio or other inputs that K and V would depend on.
    """
    kwargs = {name: value for name, value in kwargs.items() if not _is_text(name, value)}
    given = dict(zip(_parameters(type(module).forward), args, strict=False)) | kwargs
    others = sorted(name for name, value in given.items() if name not in _TOKENS and _has_tensors(value))
    if others:
        raise ValueError(
            f"{type(module).__name__} was given {', '.join(others)}, but TierStoreCache keeps K and V of text only, "
            "even with extra=. Run requests with images, audio, video or an encoder's output without TierStoreCache"
        )
    return kwargs


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameter names of a model's ``forward``, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_text(name: str, value: Any) -> bool:
    """Return whether these are token types that are all 0, which means text only."""
    return name.endswith("token_type_ids") and isinstance(value, torch.Tensor) and not bool(value.any())


def check_positions(positions: torch.Tensor, paddings: Sequence[int], columns: int) -> None:
    """Check the positions of the tokens that are fed to a cache with ``columns`` columns.

    K depends on the positions. The check also detects wrong padding, and a whole prompt that is fed again to a
    warm cache, which ``generate`` itself does not detect.

    Args:
        positions: ``[rows or 1, width]``. Models for images and text have several positions per token,
            ``[axes, rows or 1, width]``, which are equal for text.
        paddings: Number of columns of padding on the left of each row.
        columns: Number of columns in the cache.

    Raises:
        ValueError: A token has the wrong position.
    """
    width = positions.shape[-1]
    wanted = torch.arange(columns, columns + width)[None] - torch.tensor(paddings)[:, None]
    # Positions of padding are not checked.
    if bool(((positions.cpu() != wanted) & (wanted >= 0)).any()):
        raise ValueError(
            f"a cache of {columns} columns was given {width} tokens at wrong positions: the last token of each row is "
            f"at {_listed(positions[..., -1].flatten().tolist())}, but must be at {_listed(wanted[:, -1].tolist())}. "
            f"Create a TierStoreCache for each call of generate. If prompts are padded (here by "
            f"{_listed(paddings)} columns) or contain the pad token, pass the same attention_mask of ones and zeros to "
            "TierStoreCache and to generate"
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def check_mask(mask: torch.Tensor | None, paddings: Sequence[int]) -> None:
    """Raise ValueError unless the mask hides exactly the padding. Pages have no padding and no holes."""
    visible = not any(paddings)
    if mask is not None:
        seen = mask != 0
        # One tensor has the number of holes in each row, then the number of hidden columns, so that the host
        # waits for the GPU only once.
        wanted = [0] * len(seen) + [min(pad, mask.shape[-1]) for pad in paddings]
        visible = mask.ndim == 2
        if visible:
            holes = (seen[:, :-1] & ~seen[:, 1:]).sum(-1)
            visible = torch.cat([holes, (~seen).sum(-1)]).tolist() == wanted
    if not visible:
        raise ValueError(
            f"the attention mask must hide only the padding that this cache was created for ({_listed(paddings)} "
            "columns on the left of the rows): pass the same attention_mask to TierStoreCache and to generate"
        )


_BY_COLUMN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments with one entry per fed column. A mask is not one of them: it also covers earlier columns."""


def _from(name: str, given: torch.Tensor, first: int) -> torch.Tensor:
    """Return ``given`` without the columns before ``first``. Positions may have axes before the rows."""
    return given[..., first:] if name == "position_ids" else given[:, first:]


def fed_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[int]] | None:
    """Return the tokens fed to each row, or None if the model is fed embeddings."""
    ids = _input_ids(args, kwargs)
    if ids is None:
        return None
    found: list[list[int]] = ids.tolist()
    return found


def fed_again(args: tuple[Any, ...], kwargs: dict[str, Any], columns: int, paddings: Sequence[int]) -> bool:
    """Return whether a call feeds the ``columns`` columns that are already in the cache again, then new ones."""
    ids = _input_ids(args, kwargs)
    if ids is None or not 0 < columns < ids.shape[1]:
        return False
    last = last_positions(kwargs.get("position_ids"), ids.shape[0])
    return last is not None and last == [ids.shape[1] - 1 - pad for pad in paddings]


def from_column(
    args: tuple[Any, ...], kwargs: dict[str, Any], first: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without the columns before ``first``."""
    if args:
        args = (args[0][:, first:], *args[1:])
    cut = {
        name: _from(name, kwargs[name], first)
        for name in _BY_COLUMN
        if isinstance(kwargs.get(name), torch.Tensor)
    }
    return args, {**kwargs, **cut}


def up_to_column(
    args: tuple[Any, ...], kwargs: dict[str, Any], columns: int, stop: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a pass that feeds only the first ``stop`` of its columns to a cache with ``columns``."""
    if args:
        args = (args[0][:, :stop], *args[1:])
    cut = {}
    for name in _BY_COLUMN:
        given = kwargs.get(name)
        if isinstance(given, torch.Tensor):
            cut[name] = given[..., :stop] if name == "position_ids" else given[:, :stop]
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        cut["attention_mask"] = mask[:, : columns + stop]
    return args, {**kwargs, **cut}


def fed_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the number of rows and columns that are fed.

    Raises:
        ValueError: The call has neither tokens nor embeddings.
    """
    fed = args[0] if args else kwargs.get("input_ids")
    fed = kwargs.get("inputs_embeds") if fed is None else fed
    if not isinstance(fed, torch.Tensor):
        raise ValueError("the model must be called with input_ids or inputs_embeds, got neither")
    return fed.shape[0], fed.shape[1]


def with_tokens_before(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these tokens and positions prepended. Both are ``[rows, n]``.

    If the model is fed embeddings, ``embed`` computes the embeddings of these tokens.
    """
    text = torch.zeros_like(tokens)
    before = {
        "input_ids": tokens,
        "position_ids": positions,
        "token_type_ids": text,
        "mm_token_type_ids": text,
    }
    if args:
        args = (torch.cat([tokens, args[0]], 1), *args[1:])
    more = {}
    for name in _BY_COLUMN:
        given = kwargs.get(name)
        if isinstance(given, torch.Tensor):
            first = embed(tokens) if name == "inputs_embeds" else before[name].to(given.dtype)
            if name == "position_ids":
                first = first[: given.shape[-2]].expand(*given.shape[:-1], -1)
            more[name] = torch.cat([first, given], -2 if name == "inputs_embeds" else -1)
    return args, {**kwargs, **more}


def last_columns(output: Any, width: int, of: int) -> Any:
    """Cut a model's output for ``of`` columns to its last ``width`` columns. Mappings are changed in place."""
    if isinstance(output, torch.Tensor):
        return output[:, -width:] if output.ndim > 1 and output.shape[1] == of else output
    if isinstance(output, tuple):
        return tuple(last_columns(each, width, of) for each in output)
    if isinstance(output, MutableMapping):
        for name, each in output.items():
            output[name] = last_columns(each, width, of)
    return output


def joined_columns(outputs: Sequence[Any], widths: Sequence[int]) -> Any:
    """Join the outputs of passes that fed consecutive columns. Mappings are changed in place.

    Args:
        outputs: The outputs, in order.
        widths: The number of columns of each pass.
    """
    last = outputs[-1]
    if isinstance(last, torch.Tensor):
        by_column = all(
            each.ndim > 1 and each.shape[1] == width for each, width in zip(outputs, widths, strict=True)
        )
        return torch.cat(list(outputs), 1) if by_column else last
    if isinstance(last, tuple):
        return tuple(joined_columns(parts, widths) for parts in zip(*outputs, strict=True))
    if isinstance(last, MutableMapping):
        for name in last:
            last[name] = joined_columns([each[name] for each in outputs], widths)
    return last


def last_positions(positions: torch.Tensor | None, rows: int) -> list[int] | None:
    """Return the position of each row's last token, or None if positions are not given per column.

    If each token has several positions, ``[axes, rows, width]``, the first axis is used.
    """
    if positions is not None and positions.ndim == 3:
        positions = positions[0]
    if positions is None or positions.ndim != 2:
        return None
    last = [int(position) for position in positions[:, -1].tolist()]
    return last * rows if len(last) == 1 else last


def _input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
