"""The same documents in every format that the trainer reads, and tokenizers small enough to be made in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from train.config import Source

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<s> {% generation %}{{ m.content }} </s>{% endgeneration %}"
    "{% else %}<u> {{ m.content }}{% endif %} {% endfor %}"
)
WORDS = ["<unk>", "</s>", "<s>", "<u>", *"abcdefgh"]


def texts_of(count: int, *, seed: int = 0, longest: int = 150) -> list[str]:
    """Texts of 1 to `longest` characters, some of more than one byte."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, longest, count)
    return ["".join(generator.choice(list("abcdefgh \n\u00e4\u20ac"), size)) for size in sizes]


def write(folder: Path, kind: str, values: list[Any], **keys: Any) -> Source:
    """These texts, or lists of messages, under `folder` in one format, in two files where it has files."""
    folder.mkdir(parents=True, exist_ok=True)
    field = keys.get("field", "text")
    half = (len(values) + 1) // 2
    if kind == "text":
        for index, value in enumerate(values):
            (folder / f"{index:04}.txt").write_bytes(value.encode())
    elif kind == "datasets":
        import datasets

        datasets.Dataset.from_dict({field: values}).save_to_disk(folder)
    else:
        for index, part in enumerate(part for part in (values[:half], values[half:]) if part):
            _write_file(folder / f"{index}.{kind}", kind, [{field: value} for value in part])
    return Source(path=str(folder), format=kind, **keys)


def _write_file(path: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    if kind == "jsonl":
        path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)


def folder_tokenizer(folder: Path, *, eos: str | None = "</s>", template: str | None = TEMPLATE) -> str:
    """A tokenizer of transformers with one id for each of WORDS, in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


class Numbering:
    """A text "7 20" is the tokens 7000 to 7018 and an end: every token of a corpus can be told from the others."""

    size, end, pad = 10**6, 10**6 - 1, 10**6 - 2

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        numbers = [map(int, text.split()) for text in texts]
        return [1000 * document + np.arange(size - 1) for document, size in numbers]
