"""What a forward pass is fed, read off the arguments of the call."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

_BY_COLUMN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments with one entry for each column fed; a mask covers the columns before them too."""


def _from(name: str, given: torch.Tensor, first: int) -> torch.Tensor:
    """Without the columns before ``first``; positions may have axes before the rows."""
    return given[..., first:] if name == "position_ids" else given[:, first:]


def fed_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[int]] | None:
    """The tokens of each row; None if the model is fed embeddings."""
    ids = _input_ids(args, kwargs)
    if ids is None:
        return None
    found: list[list[int]] = ids.tolist()
    return found


def fed_again(args: tuple[Any, ...], kwargs: dict[str, Any], columns: int, paddings: Sequence[int]) -> bool:
    """Whether a cache that holds ``columns`` is fed all of them once more, with new ones after them."""
    ids = _input_ids(args, kwargs)
    if ids is None or not 0 < columns < ids.shape[1]:
        return False
    last = last_positions(kwargs.get("position_ids"), ids.shape[0])
    return last is not None and last == [ids.shape[1] - 1 - pad for pad in paddings]


def from_column(
    args: tuple[Any, ...], kwargs: dict[str, Any], first: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call without the columns before ``first``."""
    if args:
        args = (args[0][:, first:], *args[1:])
    cut = {
        name: _from(name, kwargs[name], first)
        for name in _BY_COLUMN
        if isinstance(kwargs.get(name), torch.Tensor)
    }
    return args, {**kwargs, **cut}


def fed_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that are fed. ValueError if that does not show."""
    fed = args[0] if args else kwargs.get("input_ids")
    fed = kwargs.get("inputs_embeds") if fed is None else fed
    if not isinstance(fed, torch.Tensor):
        raise ValueError("the model was fed neither input_ids nor inputs_embeds")
    return fed.shape[0], fed.shape[1]


def with_tokens_before(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with these tokens, at these positions, fed before the others; ``[rows, n]`` each."""
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
    """What a model gave for the last ``width`` of the ``of`` columns that it was fed, in place of all of it."""
    if isinstance(output, torch.Tensor):
        return output[:, -width:] if output.ndim > 1 and output.shape[1] == of else output
    if isinstance(output, tuple):
        return tuple(last_columns(each, width, of) for each in output)
    if isinstance(output, MutableMapping):
        for name, each in output.items():
            output[name] = last_columns(each, width, of)
    return output


def last_positions(positions: torch.Tensor | None, rows: int) -> list[int] | None:
    """The position of each row's last token; None if positions are not given one a column.

    Of several axes, ``[axes, rows, width]``, the first counts.
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
