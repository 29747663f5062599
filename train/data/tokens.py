"""Text or a conversation -> token ids and labels of one document.

Letters: N tokens of one document.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..config import Data

IGNORED = -100
"""Label of a token without a target."""

Encoded = tuple[np.ndarray, np.ndarray]
"""(ids, labels) of one document, int64 [N] each."""

Encoder = Callable[[list[Any]], list[Encoded]]
"""What rows hold -> what they are in tokens. Raises: ValueError if any of them cannot be encoded."""


class Tokenizer(Protocol):
    """Token ids of texts. size: ids are below it; end: closes each document; pad: fills a sequence."""

    size: int
    end: int
    pad: int

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Each text as int64 ids, without `end`."""


class ByteTokenizer:
    """The bytes of the text, whatever its encoding; 256 ends a document, 257 pads."""

    size, end, pad = 258, 256, 257

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]


class FolderTokenizer:
    """A tokenizer of transformers from a local folder. Raises: ValueError if it has no token to end a document."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"data.tokenizer = {folder!r} holds no tokenizer of transformers: {error}") from error
        self.size = len(self._tokenizer)
        self.end = self._tokenizer.eos_token_id
        if self.end is None:
            raise ValueError(f"data.tokenizer = {folder!r} has no eos_token, which must end each document")
        pad = self._tokenizer.pad_token_id
        self.pad = self.end if pad is None else pad

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Several at a time, because the library spreads texts over the cores. Raises: ValueError if not UTF-8."""
        try:
            decoded = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None
        encoded = self._tokenizer(decoded, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, np.int64) for ids in encoded["input_ids"]]

    def check_chat(self) -> None:
        """Refuse a chat template that is missing, or does not mark the assistant's answers. Raises: ValueError."""
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ValueError(
                f"data.tokenizer = {self.folder!r} has no single chat template, which a source with chat = true needs"
            )
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            raise ValueError(
                f"the chat template of data.tokenizer = {self.folder!r} does not mark the answers: put "
                "{% generation %} and {% endgeneration %} around what the assistant says"
            )

    def encode_chat(self, messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 [N] of a conversation, and bool [N]: whether the assistant said this token."""
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.asarray(encoded["input_ids"], np.int64), np.asarray(encoded["assistant_masks"], bool)


def tokenizer_of(data: Data, vocab_size: int) -> Tokenizer:
    """The tokenizer that [data] names. ValueError naming both sizes if its ids do not fit the model's embedding."""
    tokenizer: Tokenizer = ByteTokenizer() if data.tokenizer == "bytes" else FolderTokenizer(data.tokenizer)
    if tokenizer.size > vocab_size:
        raise ValueError(
            f"data.tokenizer = {data.tokenizer!r} has {tokenizer.size} token ids, model.config.vocab_size = "
            f"{vocab_size} holds fewer: at least {tokenizer.size} is needed"
        )
    return tokenizer


def labels_of(ids: np.ndarray) -> np.ndarray:
    """The id that follows each token of one document; its last token has no target. int64, same length."""
    return np.append(ids[1:], IGNORED)


def text_encoder(tokenizer: Tokenizer) -> Encoder:
    """Encodes texts, bytes or str, each closed by `end`; each next token is a target."""

    def encode(texts: list[Any]) -> list[Encoded]:
        documents = [np.append(ids, tokenizer.end) for ids in tokenizer.encode([_bytes_of(text) for text in texts])]
        return [(ids, labels_of(ids)) for ids in documents]

    return encode


def _bytes_of(text: Any) -> bytes:
    if not isinstance(text, bytes | str):
        raise ValueError(f"a text was expected, found {type(text).__name__}")
    try:
        return text.encode("utf-8") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start}, which is no text") from None


def id_encoder(tokenizer: Tokenizer) -> Encoder:
    """Takes lists or arrays of ids as they are, each closed by `end` unless it is; each next token is a target."""
    return lambda rows: [(ids, labels_of(ids)) for ids in (_ids_of(row, tokenizer) for row in rows)]


def _ids_of(row: Any, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(row, list | np.ndarray):
        raise ValueError(f"a list of token ids was expected, found {type(row).__name__}")
    ids = np.asarray(row)
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"a list of token ids was expected, found one of {ids.dtype.name} in {ids.ndim} dimension(s)")
    bad = ids[(ids < 0) | (ids >= tokenizer.size)]
    if bad.size:
        raise ValueError(f"token id {bad[0]}: data.tokenizer has the ids 0 to {tokenizer.size - 1}")
    closed = bool(ids.size) and ids[-1] == tokenizer.end
    return ids.astype(np.int64) if closed else np.append(ids.astype(np.int64), tokenizer.end)


def chat_encoder(tokenizer: Tokenizer) -> Encoder:
    """Encodes lists of messages through the tokenizer's chat template; the assistant's tokens alone are targets.

    Raises: ValueError if the tokenizer cannot tell which tokens the assistant said.
    """
    if not isinstance(tokenizer, FolderTokenizer):
        raise ValueError("data.tokenizer = 'bytes' has no chat template: a source with chat = true needs a folder")
    tokenizer.check_chat()
    return lambda conversations: [_encode_chat(tokenizer, messages) for messages in conversations]


def _encode_chat(tokenizer: FolderTokenizer, messages: Any) -> Encoded:
    from jinja2 import TemplateError

    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("a list of messages, each with a role, was expected")
    if not messages:
        raise ValueError("a list of messages was expected, found an empty one")
    try:
        ids, answers = tokenizer.encode_chat(messages)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    labels = np.where(np.append(answers[1:], False), labels_of(ids), IGNORED)
    if (labels == IGNORED).all():
        raise ValueError("no message is an answer of the assistant: there is nothing to train on")
    return ids, labels
