"""The page keys of a document, computed in the same way as in the transformers adapter.

This module imports torch and transformers, which takes seconds.
"""

# transformers leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tierstore.adapters.huggingface import page_specs
from tierstore.archive.closed_store import ClosedSource, Shard
from tierstore.cli.output import progress
from tierstore.demo.model import ModelError, model_folder
from tierstore.errors import ConfigError
from tierstore.keys import namespace, page_keys
from tierstore.page import DTYPE_NBYTES, PageLayout
from tierstore.types import PageKey

_GOES_ON = ("\n\nWhat", "\n\n1", " and")
"""Sample texts that may follow a document in a prompt.

The last tokens of a document may depend on the text that follows. Tokens that differ between these samples are
not counted as tokens of the document.
"""


class Document:
    """A text file, and the model for which its page keys are computed."""

    def __init__(self, path: Path, model: str, dtype: str) -> None:
        """Read the text, and load the model and its tokenizer.

        Args:
            path: The text file, in UTF-8.
            model: The name of a known model, which is prepared if necessary, or a model's folder.
            dtype: The dtype in which the model computes.

        Raises:
            ConfigError: The text cannot be read, the dtype is not supported, or the model cannot be loaded.
        """
        self.model, self.dtype = model, dtype
        try:
            self._text = _read(path)
            if dtype not in DTYPE_NBYTES:
                raise ConfigError(f"--dtype must be one of {', '.join(sorted(DTYPE_NBYTES))}, got {dtype!r}")
            folder = model_folder(model, progress.print)
            transformers_logging.disable_progress_bar()
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            self._weights: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
        except (ModelError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def shards_among(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards whose pages come from this model. Their page sizes may differ."""
        return [
            shard
            for shard in shards
            if self._layout(shard).fingerprint == shard.description.layout.fingerprint
        ]

    def keys(self, source: ClosedSource) -> list[PageKey]:
        """Return the keys of all full pages of the document.

        A prompt may start with the document in several forms: in the user or the system message of a chat, or
        on its own, with or without special tokens. The form with the longest prefix of pages in ``source`` is
        used. Return an empty list if ``source`` does not contain the first page in any form.

        Raises:
            ConfigError: The document is shorter than a page.
        """
        there = set(source.keys())
        ways = [self._keys(tokens, source) for tokens in self._beginnings()]
        best = max(ways, key=lambda keys: len(list(takewhile(there.__contains__, keys))))
        if not best:
            raise ConfigError(
                "the document of --doc is shorter than one page, and only full pages are stored: use a longer document"
            )
        return best if best[0] in there else []

    def _layout(self, shard: Shard) -> PageLayout:
        try:
            return PageLayout.of(page_specs(self._weights, shard.description.layout.page_size))
        except ValueError as error:
            raise ConfigError(f"--model {self.model}: {error}") from error

    def _keys(self, tokens: Sequence[int], source: ClosedSource) -> list[PageKey]:
        layout = source.description.layout
        return page_keys(
            tokens,
            page_size=layout.page_size,
            namespace=namespace(layout.specs, loss_class=source.description.loss_class),
            group=layout.specs[0].group,
            shard=layout.shard,
        )

    def _beginnings(self) -> list[list[int]]:
        """Return, for each form of prompt, the tokens with which all prompts about the document start."""
        ways = []
        if self._tokenizer.chat_template:
            for role in ("user", "system"):
                ways.append(_common([self._chat(role, self._text + more) for more in _GOES_ON]))
        for special in (True, False):
            ways.append(_common([self._tokens(self._text + more, special=special) for more in _GOES_ON]))
        return ways

    def _chat(self, role: str, text: str) -> list[int]:
        chat = [{"role": role, "content": text}]
        prompt = str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        return self._tokens(prompt, special=False)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--doc {path}: cannot read the text file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--doc {path}: the text must be UTF-8, but byte {error.start} is invalid"
        ) from error


def _common(ways: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest common prefix of several sequences of tokens."""
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*ways, strict=False))]
