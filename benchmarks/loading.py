"""What one packed sequence costs the thread that loads: CPU time by kind of data, in one process, without training.

python benchmarks/loading.py [--length 131072] [--sequences 25]

The documents are Python's standard library. "text" is encoded by a byte-level BPE of 32,000 ids that is trained on
them, with the split of Llama 3; "tokens" are its ids in Parquet. CPU time, because a tokenizer spreads over the cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from provenance import ROOT, on_cpu

sys.path.insert(0, str(ROOT))

from train import data
from train.config import Data, Source
from train.data.sources import files_of

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIBRARY = Source(path="stdlib", format="text", pattern="**/*.py")


def train_tokenizer(texts: list[str], folder: Path) -> str:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|end_of_text|>"
    trainer = trainers.BpeTrainer(
        vocab_size=32000, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end).save_pretrained(folder)
    return str(folder)


def sources(folder: Path) -> dict[str, Data]:
    """The same documents in every kind, below a folder."""
    import pyarrow
    from pyarrow import parquet

    texts = [file.read_bytes().decode(errors="replace") for file in files_of(LIBRARY)]
    name = train_tokenizer(texts, folder / "tokenizer")
    ids = data.tokenizer_of(Data(tokenizer=name), 10**6).encode([text.encode() for text in texts])
    parquet.write_table(
        pyarrow.table({"ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32()))}),
        folder / "ids.parquet",
        row_group_size=100,
    )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines)
    jsonl = Source(path=str(folder / "text.jsonl"), format="jsonl")
    tokens = Source(path=str(folder / "ids.parquet"), format="parquet", field="ids", tokens=True)
    return {
        "bytes": Data(sources=[jsonl]),
        "text": Data(sources=[jsonl], tokenizer=name),
        "tokens": Data(sources=[tokens], tokenizer=name),
    }


def measure(section: Data, *, length: int, count: int) -> dict[str, float]:
    """CPU seconds of the process, and of its Python thread alone, for one sequence with its state."""
    packer = data.sequences(section, data.tokenizer_of(section, 10**6), length=length, seed=0)
    next(packer)
    process, thread, tokens = time.process_time(), time.thread_time(), 0
    for _ in range(count):
        tokens += next(packer).cu_seqlens[-1]
        packer.state()
    process, thread = time.process_time() - process, time.thread_time() - thread
    return {
        "cpu_s": round(process / count, 4),
        "python_s": round(thread / count, 4),
        "tokens_per_cpu_s": round(tokens / process),
        "padding_share": round(1 - tokens / length / count, 5),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=25, help="how many are measured")
    arguments = parser.parse_args()
    words = ["--length", str(arguments.length), "--sequences", str(arguments.sequences)]
    where = on_cpu("loading.py", words)
    with tempfile.TemporaryDirectory() as folder:
        for kind, section in sources(Path(folder)).items():
            numbers = measure(section, length=arguments.length, count=arguments.sequences)
            print(json.dumps({"kind": kind, "length": arguments.length} | numbers | where), flush=True)
