"""The model that a server answers with, and its tokenizer."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Literal, Self

import torch
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from tierstore.adapters.huggingface import ATTENTION
from tierstore.errors import ConfigError
from tierstore.serve.request import RefusedError

Dtype = Literal["auto", "float32", "bfloat16"]

_HERE = "\ue000"
"""Stands where the question will be. Of the private use area: no text has a use for it."""
_APART = "\n\n"
_ANSWER = "\nAnswer:"
"""How a model without a chat template is asked for one."""


class Reader:
    """A model and its tokenizer. The model is the engine's alone; everything here may be called from any thread."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes the model over. ConfigError for a tokenizer that cannot spell an answer piece by piece."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"--model {name} has a {type(tokenizer).__name__}; allowed: a model with a fast tokenizer "
                "(tokenizer.json)"
            )
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._lock = Lock()  # a fast tokenizer is one object, and keeps settings of its last call
        self._plain: Tokenizer = deepcopy(tokenizer.backend_tokenizer)
        self._plain.encode_special_tokens = True  # as the characters that they are made of

    @classmethod
    def load(cls, folder: Path, device: str, dtype: Dtype = "auto", name: str | None = None) -> Self:
        """The model in ``folder`` on ``device``; nothing is downloaded. ``auto``: as it is stored there.

        ConfigError for what transformers cannot load.
        """
        transformers_logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=ATTENTION,
                local_files_only=True,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--model {folder}: {error}; allowed: a folder that transformers loads"
            ) from error
        torch.nn.Module.to(model, device)
        return cls(name or folder.name, model, tokenizer)

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer together, by the model's configuration."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Tokens are 0 to one less."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        config = self.model.generation_config
        given = config.eos_token_id if config is not None else None
        listed = given if isinstance(given, list) else [given]
        return frozenset(token for token in (*listed, self.tokenizer.eos_token_id) if token is not None)

    def tokens(self, text: str) -> list[int]:
        """Of a whole prompt, with the special tokens that the tokenizer puts around it."""
        return self._tokens(text, special=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Of a conversation that the model goes on with. RefusedError if its template does not take it."""
        return self._tokens(self._rendered(messages), special=False)

    def about(self, document: str) -> list[int]:
        """The beginning of every prompt about a document: what goes before the question. See ``question``.

        In neither a special word of the tokenizer is one: a text cannot end the message that it is in.
        """
        before, _ = self._around()
        return before + self._literally(document + _APART)

    def question(self, question: str) -> list[int]:
        """The end of a prompt about any document. Apart from its beginning, so that equal documents stay equal."""
        _, after = self._around()
        return self._literally(question) + after

    def _around(self) -> tuple[list[int], list[int]]:
        """What goes before a user's message, and after it."""
        if not self.tokenizer.chat_template:
            begins = [
                token for token in self._tokens("", special=True)[:1] if token == self.tokenizer.bos_token_id
            ]
            return begins, self._tokens(_ANSWER, special=False)
        before, found, after = self._rendered([{"role": "user", "content": _HERE}]).partition(_HERE)
        if not found:
            raise RefusedError("the model's chat template does not repeat what it is given")
        return self._tokens(before, special=False), self._tokens(after, special=False)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            raise RefusedError(f"{self.name} has no chat template; allowed: completions")
        given = [dict(message) for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise RefusedError(f"the model's chat template refuses these messages: {error}") from error

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            found = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in found["input_ids"]]

    def _literally(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)
