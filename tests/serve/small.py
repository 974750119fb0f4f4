"""A small model for tests of the server. Its tokens are bytes, and its chat template is one line."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from queue import Empty, Queue
from threading import Event as Flag

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.adapters.tiny import tiny_llama
from tests.support.pages import PATIENCE_S
from tierstore.serve.engine import Engine, Ticket
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask, Done, Event, Failed, Piece, Read, Sampling, Usage

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 256 + len(SPECIAL)
GREEDY = Sampling(temperature=0)


@cache
def tokenizer(*, chats: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and per special word. ``chats`` tells whether it has a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|end|>")
    found.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    if chats:
        found.chat_template = TEMPLATE
    return found


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text, without special tokens before or after it."""
    return [int(token) for token in tokenizer()(text, add_special_tokens=False)["input_ids"]]


@cache
def reader(*, chats: bool = True, ends: bool = False) -> Reader:
    """Return the small model with its tokenizer.

    ``ends`` tells whether the model can end an answer. If not, every answer has as many tokens as requested.
    """
    found = Reader("tiny", tiny_llama(vocabulary=VOCABULARY), tokenizer(chats=chats))
    if not ends:
        found.tokenizer.eos_token = None
    return found


@dataclass
class Standing:
    """The state of a paused model: ``stands`` is set when it pauses, and it continues once ``go_on`` is set."""

    stands: Flag = field(default_factory=Flag)
    go_on: Flag = field(default_factory=Flag)

    def wait(self) -> None:
        """Wait until the model has paused."""
        assert self.stands.wait(PATIENCE_S)


@contextmanager
def standing_at(forward: int, model: PreTrainedModel) -> Iterator[Standing]:
    """Pause the model before this forward pass, counted from 0, until ``go_on`` is set."""
    passes, found = count(), Standing()

    def stand_still(*_: object) -> None:
        if next(passes) == forward:
            found.stands.set()
            assert found.go_on.wait(PATIENCE_S)

    hook = model.register_forward_pre_hook(stand_still)
    try:
        yield found
    finally:
        found.go_on.set()
        hook.remove()


@dataclass
class Told:
    """Collects what an engine reports about one request."""

    events: Queue[Event] = field(default_factory=Queue)
    reads: list[int] = field(default_factory=list)
    text: str = ""
    end: Done | Failed | None = None

    def wait(self, timeout_s: float = PATIENCE_S) -> Done | Failed:
        """Wait until the request has ended, and return how it ended."""
        while self.end is None:
            self._take(self.events.get(timeout=timeout_s))
        return self.end

    def first(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the first text of the answer has arrived, or the request has ended."""
        while not self.text and self.end is None:
            self._take(self.events.get(timeout=timeout_s))

    def more(self) -> bool:
        """Take the next event without waiting. Return whether there was one."""
        try:
            self._take(self.events.get_nowait())
        except Empty:
            return False
        return True

    def done(self) -> Usage:
        """Wait until the request has ended, assert that it was answered, and return its usage."""
        end = self.wait()
        assert isinstance(end, Done), end
        return end.usage

    def _take(self, event: Event) -> None:
        match event:
            case Read(tokens):
                self.reads.append(tokens)
            case Piece(text):
                self.text += text
            case _:
                self.end = event


def ask(engine: Engine, prompt: list[int] | str, max_tokens: int = 8, **more: object) -> tuple[Ticket, Told]:
    """Submit a request, and collect what is reported about it. Sampling is greedy unless ``more`` overrides it."""
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    told = Told()
    given: dict[str, object] = {"sampling": GREEDY, **more}
    return engine.submit(Ask(prompt=tuple(ids), max_tokens=max_tokens, **given), told.events.put), told  # type: ignore[arg-type]
