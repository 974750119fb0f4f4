"""The model that the server runs, with its tokenizer and chat template."""

# transformers leaves some functions untyped:
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
from tierstore.adapters.huggingface.model_spec import check_model, model_of_option
from tierstore.errors import ConfigError
from tierstore.serve.request import RefusedError

Dtype = Literal["auto", "float32", "bfloat16"]

_HERE = "\ue000"
"""Placeholder for the question in a chat template's output: a private-use character, which no template contains."""
_APART = "\n\n"
_ANSWER = "\nAnswer:"
"""Text that follows the question in the prompt of a model without a chat template."""


class Reader:
    """A model and its tokenizer. Only the engine may run the model. The methods of this class are thread-safe."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the model to evaluation mode, and prepare a second tokenizer that ignores special tokens in texts.

        Args:
            name: The name under which clients request the model.
            model: The model. The caller must not run it afterwards.
            tokenizer: The model's tokenizer. It must be a fast tokenizer, which can decode answers token by token.

        Raises:
            ConfigError: The tokenizer is not a fast tokenizer.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"--model {name} has a {type(tokenizer).__name__}, but the server needs a fast tokenizer; "
                "add the model's tokenizer.json to its folder"
            )
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._lock = Lock()  # guards the tokenizer, because each call changes its settings
        self._plain: Tokenizer = deepcopy(tokenizer.backend_tokenizer)
        self._plain.encode_special_tokens = True  # a special token within a text is encoded as ordinary text

    @classmethod
    def load(cls, folder: Path, device: str, dtype: Dtype = "auto", name: str | None = None) -> Self:
        """Load a model and its tokenizer from a directory. Nothing is downloaded.

        Args:
            folder: The directory, in the format of transformers.
            device: The device that runs the model, such as ``cuda:0``.
            dtype: The dtype of the weights. ``auto`` keeps the dtype in which they are stored.
            name: The name under which clients request the model. By default, the name of the directory.

        Raises:
            ConfigError: transformers cannot load the model, or TierStore cannot serve it.
        """
        transformers_logging.disable_progress_bar()
        with model_of_option(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=ATTENTION,
                local_files_only=True,
            )
            check_model(model)
            torch.nn.Module.to(model, device)
        return cls(name or folder.name, model, tokenizer)

    @property
    def max_tokens(self) -> int:
        """Return the context length from the model's configuration, which limits prompt and answer together."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Return the size of the vocabulary. Token IDs are 0 to ``vocabulary - 1``."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def ends(self) -> frozenset[int]:
        """Return the IDs of the tokens that end an answer."""
        config = self.model.generation_config
        given = config.eos_token_id if config is not None else None
        listed = given if isinstance(given, list) else [given]
        return frozenset(token for token in (*listed, self.tokenizer.eos_token_id) if token is not None)

    def tokens(self, text: str) -> list[int]:
        """Tokenize a complete prompt, including the special tokens that the tokenizer adds."""
        return self._tokens(text, special=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render a conversation with the model's chat template, and tokenize the result for the model to continue.

        Raises:
            RefusedError: The model has no chat template, or the template rejects the messages.
        """
        return self._tokens(self._rendered(messages), special=False)

    def about(self, document: str) -> list[int]:
        """Tokenize the first part of a prompt about a document: everything before the question.

        All prompts about the document start with these tokens; ``question`` returns the rest. Special tokens
        in the document or the question are encoded as ordinary text, so neither text can end the user's
        message.

        Raises:
            RefusedError: The output of the model's chat template does not contain the messages.
        """
        before, _ = self._around()
        return before + self._literally(document + _APART)

    def question(self, question: str) -> list[int]:
        """Tokenize the second part of a prompt about a document: the question and everything after it.

        This part is tokenized separately from the first part (see ``about``), so that the tokens of a document do
        not depend on the question.
        """
        _, after = self._around()
        return self._literally(question) + after

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that come before and after the text of a user's message in a prompt."""
        if not self.tokenizer.chat_template:
            begins = [
                token for token in self._tokens("", special=True)[:1] if token == self.tokenizer.bos_token_id
            ]
            return begins, self._tokens(_ANSWER, special=False)
        before, found, after = self._rendered([{"role": "user", "content": _HERE}]).partition(_HERE)
        if not found:
            raise RefusedError(
                "the output of the model's chat template does not contain the messages: correct the template"
            )
        return self._tokens(before, special=False), self._tokens(after, special=False)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            raise RefusedError(f"model {self.name} has no chat template: use /v1/completions instead")
        given = [dict(message) for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise RefusedError(f"the model's chat template rejects these messages: {error}") from error

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            found = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in found["input_ids"]]

    def _literally(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)
