"""Documents, packing, labels, order and windows; tokenizers against the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import corpora
import numpy as np
import pytest

import ringflash
from train import data
from train.config import Batch, Data, Source
from train.data.packing import Bin, Packer
from train.data.sources import files_of
from train.data.stream import Corpus, Piece, Place, Stream
from train.data.tokens import ByteTokenizer, labels_of

IGNORED = data.IGNORED


def stream_of(folder, *, length=64, seed=0, shuffle=True, pattern="**/*.txt"):
    corpus = Corpus(Data(path=str(folder), pattern=pattern, shuffle=shuffle), ByteTokenizer())
    return Stream(corpus, length=length, seed=seed)


def packer(folder, *, length=64, **options):
    return Packer(stream_of(folder, length=length, **options), length=length, pad=257)


def sequences(folder, count, **options):
    return list(islice(packer(folder, **options), count))


def piece(*ids):
    ids = np.asarray(ids, np.int64)
    return Piece(ids, labels_of(ids), Place(0, 0, 0, 0, len(ids)))


def test_a_document_is_named_and_by_its_numbers_where_it_is_gone(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"text": "{text}"}}\n\n' for text in ("one", "two", "three")))
    source = Source(path=str(file), format="jsonl", field="text")
    stream = Stream(Corpus(Data(sources=[source], shuffle=False), ByteTokenizer()), length=14, seed=0)
    packed = Packer(stream, length=14, pad=257)
    places = next(packed).places
    assert packed.names(places, lines=True) == [f"{file}, line {line}" for line in (1, 3, 5)]
    assert packed.names(places, lines=False) == [f"{file}, {byte}" for byte in (0, 17, 34)]
    file.unlink()
    assert packed.names(places[1:], lines=True) == [f"row {row} of chunk 0 of source 0" for row in (1, 2)]


def test_R50_labels_stay_inside_documents():
    (packed,) = Packer(iter([piece(10, 11, 12), piece(20, 21)]), length=5, pad=0)
    assert packed.ids.tolist() == [10, 11, 12, 20, 21]
    assert packed.cu_seqlens == [0, 3, 5]
    assert packed.labels.tolist() == [11, 12, IGNORED, 21, IGNORED]


def test_R46_valid_labels_of_padded_documents():
    stream = iter([piece(*range(5)), piece(5, 6, 7), piece(8)])
    sequence = Bin(list(stream)).close(12, 257)
    assert sequence.valid_targets == 4 + 2
    assert sequence.cu_seqlens == [0, 5, 8, 9]
    assert sequence.lengths == [5, 3, 1]
    assert sequence.ids[9:].tolist() == [257] * 3
    assert (sequence.labels[9:] == IGNORED).all()


@pytest.mark.parametrize("layout", ringflash.LAYOUTS)
def test_R46_shards_hold_every_label_once(layout):
    sequence = Bin([piece(*range(5)), piece(5, 6, 7)]).close(16, 257)
    order = ringflash.Ring(layout=layout).layout(16, cu_seqlens=sequence.cu_seqlens).order
    assert (sequence.labels[order] != IGNORED).sum() == 6


def test_long_documents_are_cut_and_lose_neither_token_nor_target(tmp_path):
    text = bytes(range(32, 122))
    (tmp_path / "a.txt").write_bytes(text)
    parts = list(islice(stream_of(tmp_path, length=20), 5))
    assert [len(part.ids) for part in parts] == [20, 20, 20, 20, 11]
    ids, labels = (np.concatenate(x) for x in zip(*(part[:2] for part in parts), strict=True))
    assert ids.tolist() == [*text, 256]
    assert labels.tolist() == [*text[1:], 256, IGNORED]


def test_every_token_is_packed_once_an_epoch(texts):
    total = sum(len(file.read_bytes()) + 1 for file in texts.iterdir())
    kept, seen = [], 0
    for part in stream_of(texts):
        kept.append(part)
        seen += len(part.ids)
        if seen == total:
            break
    packed = Packer(iter(kept), length=64, pad=257)
    out = np.concatenate([s.ids[: s.cu_seqlens[-1]] for s in packed])
    assert len(out) > 0.6 * total  # the rest is still open when this stream ends
    assert all(s.cu_seqlens[-1] <= 64 and len(s.ids) == 64 for s in sequences(texts, 20))


def test_padding_is_small():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5, 1, 2000), 1, 1024).astype(int)
    packed = list(Packer((piece(*range(n)) for n in lengths), length=1024, pad=0))
    assert sum(s.cu_seqlens[-1] for s in packed) / (1024 * len(packed)) > 0.97


def test_R54_order_follows_the_seed_alone(texts):
    def first_ids(**options):
        return [s.ids.tolist() for s in sequences(texts, 30, **options)]

    assert first_ids(seed=0) == first_ids(seed=0)
    assert first_ids(seed=0) != first_ids(seed=1)
    assert first_ids(shuffle=False, seed=0) == first_ids(shuffle=False, seed=1)
    documents = [part.ids for part in islice(stream_of(texts, shuffle=False, length=1000), 31)]
    assert [d[:-1].astype(np.uint8).tobytes() for d in documents] == [f.read_bytes() for f in sorted(texts.iterdir())]


def test_epochs_differ_in_order_and_hold_the_same_documents(texts):
    both = [part.ids.tobytes() for part in islice(stream_of(texts, length=1000), 62)]
    assert both[:31] != both[31:]
    assert sorted(both[:31]) == sorted(both[31:])


@pytest.mark.parametrize(("data_size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_R52_R57_meshes_share_out_the_same_global_batches(texts, data_size, accumulation):
    batch = Batch(4, 1, accumulation)
    wanted = [s.digest() for s in sequences(texts, 12)]
    per_rank = []
    for data_rank in range(data_size):
        windows = list(islice(data.Windows(packer(texts), batch, data_rank=data_rank, data_size=data_size), 3))
        assert [len(w) for w in windows] == [accumulation] * 3
        assert all(len(micro) == 1 for w in windows for micro in w)
        per_rank.append([[micro[0].digest() for micro in window] for window in windows])
    for step in range(3):
        taken = [digest for windows in per_rank for digest in windows[step]]
        assert sorted(taken) == sorted(wanted[4 * step : 4 * step + 4])
        assert len(set(taken)) == 4


def test_R52_a_changed_token_names_its_rank(texts):
    (sequence,) = sequences(texts, 1)
    ids = sequence.ids.copy()
    ids[7] += 1
    same = data.window_digest([[sequence]])
    other = data.window_digest([[replace(sequence, ids=ids)]])
    data.check_digests(np.asarray([1, 1, 1, 1, 2, 2, 2, 2], float), 4)
    data.check_digests(np.asarray([same] * 4, float), 4)
    with pytest.raises(ValueError, match=r"rank\(s\) \[6\] hold another batch.* ranks 4 to 7"):
        data.check_digests(np.asarray([1, 1, 1, 1, same, same, other, same], float), 4)


@pytest.mark.parametrize("change", ["ids", "labels", "cu_seqlens"])
def test_digest_sees_everything_that_must_agree(texts, change):
    (sequence,) = sequences(texts, 1)
    values = {
        "ids": np.roll(sequence.ids, 1),
        "labels": np.roll(sequence.labels, 1),
        "cu_seqlens": sequence.cu_seqlens[:-1],
    }
    assert replace(sequence, **{change: values[change]}).digest() != sequence.digest()


def test_stdlib_is_found_without_packages_and_tests():
    files = files_of(Source(path="stdlib", format="text", pattern="**/*.py"))
    names = [file.name for file in files]
    assert "dataclasses.py" in names
    assert files == sorted(files)
    assert not [file for file in files if "site-packages" in file.parts or "test" in file.parts]


def test_folder_tokenizer(tmp_path):
    tokenizer = data.tokenizer_of(Data(path="x", tokenizer=corpora.folder_tokenizer(tmp_path)), 12)
    assert (tokenizer.size, tokenizer.end, tokenizer.pad) == (12, 1, 1)
    assert [ids.tolist() for ids in tokenizer.encode([b"c a  b\nzz a", b""])] == [[6, 4, 5, 0, 4], []]


def test_tokenizer_that_does_not_fit_the_model_names_both_sizes(tmp_path):
    folder = corpora.folder_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"has 12 token ids, model.config.vocab_size = 11 holds fewer: at least 12"):
        data.tokenizer_of(Data(path="x", tokenizer=folder), 11)
    with pytest.raises(ValueError, match=r"258 token ids, model.config.vocab_size = 257"):
        data.tokenizer_of(Data(path="x"), 257)


def test_tokenizer_without_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no eos_token"):
        data.tokenizer_of(Data(path="x", tokenizer=corpora.folder_tokenizer(tmp_path, eos=None)), 100)
