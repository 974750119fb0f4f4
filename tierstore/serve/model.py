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
"""Placeholder for the question. A private-use character, which no text has a use for."""
_APART = "\n\n"
_ANSWER = "\nAnswer:"
"""Ends the prompt of a model without a chat template, to ask for an answer."""


class Reader:
    """A model and its tokenizer. Only the engine uses the model; the methods here are thread-safe."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take over a model. ConfigError for a tokenizer that cannot decode an answer piece by piece."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"--model {name} has a {type(tokenizer).__name__}, but needs a fast tokenizer "
                "(tokenizer.json)"
            )
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._lock = Lock()  # a fast tokenizer is one shared object that remembers settings of its last call
        self._plain: Tokenizer = deepcopy(tokenizer.backend_tokenizer)
        self._plain.encode_special_tokens = True  # special tokens in a text are encoded as plain characters

    @classmethod
    def load(cls, folder: Path, device: str, dtype: Dtype = "auto", name: str | None = None) -> Self:
        """Load the model in ``folder`` onto ``device``, without downloads. ``auto`` keeps the stored dtype.

        Raises:
            ConfigError: transformers cannot load the folder.
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
            raise ConfigError(f"--model {folder}: transformers cannot load the model: {error}") from error
        torch.nn.Module.to(model, device)
        return cls(name or folder.name, model, tokenizer)

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a prompt and its answer together, by the model's configuration."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens, whose ids begin at 0."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        config = self.model.generation_config
        given = config.eos_token_id if config is not None else None
        listed = given if isinstance(given, list) else [given]
        return frozenset(token for token in (*listed, self.tokenizer.eos_token_id) if token is not None)

    def tokens(self, text: str) -> list[int]:
        """Tokenize a whole prompt, with the special tokens that the tokenizer adds."""
        return self._tokens(text, special=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokenize a conversation for the model to continue. RefusedError if the chat template refuses it."""
        return self._tokens(self._rendered(messages), special=False)

    def about(self, document: str) -> list[int]:
        """Tokenize the beginning of every prompt about a document: all before the question. See ``question``.

        Special words of the tokenizer are plain text in both, so a text cannot end its message.
        """
        before, _ = self._around()
        return before + self._literally(document + _APART)

    def question(self, question: str) -> list[int]:
        """Tokenize the end of a prompt about any document, apart from the beginning, so that equal documents have
        equal tokens.
        """
        _, after = self._around()
        return self._literally(question) + after

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the tokens before a user's message and those after it."""
        if not self.tokenizer.chat_template:
            begins = [
                token for token in self._tokens("", special=True)[:1] if token == self.tokenizer.bos_token_id
            ]
            return begins, self._tokens(_ANSWER, special=False)
        before, found, after = self._rendered([{"role": "user", "content": _HERE}]).partition(_HERE)
        if not found:
            raise RefusedError("the model's chat template does not repeat its input")
        return self._tokens(before, special=False), self._tokens(after, special=False)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            raise RefusedError(f"{self.name} has no chat template: use completions instead")
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
