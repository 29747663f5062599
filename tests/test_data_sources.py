"""Where documents come from: formats, mixtures, conversations, and what is refused with file and line."""

from __future__ import annotations

import json
from itertools import islice

import corpora
import numpy as np
import pytest

from train import data
from train.config import Data, Source
from train.data import sources
from train.data.stream import Corpus, Stream
from train.data.tokens import ByteTokenizer, FolderTokenizer

IGNORED = data.IGNORED
TEXTS = corpora.texts_of(20)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def stream(*listed, tokenizer=None, seed=0, shuffle=True, length=10**6):
    corpus = Corpus(Data(sources=list(listed), shuffle=shuffle), tokenizer or ByteTokenizer())
    return Stream(corpus, length=length, seed=seed)


def texts(pieces):
    return [piece.ids[:-1].astype(np.uint8).tobytes().decode() for piece in pieces]


@pytest.mark.parametrize("kind", sources.FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_format_gives_the_same_documents_in_each_epoch(tmp_path, kind, shuffle):
    source = corpora.write(tmp_path / kind, kind, TEXTS)
    read = texts(islice(stream(source, shuffle=shuffle), 40))
    assert sorted(read[:20]) == sorted(read[20:]) == sorted(TEXTS)
    assert (read[:20] == TEXTS) is not shuffle
    assert (read[:20] == read[20:]) is not shuffle


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50, 300, 10**6])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_each_json_line_belongs_to_one_chunk(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(sources, "JSONL_CHUNK", chunk)
    (tmp_path / "a.jsonl").write_bytes(end.join(json.dumps({"text": text}) for text in TEXTS).encode())
    source = Source(path=str(tmp_path / "a.jsonl"), format="jsonl")
    assert texts(islice(stream(source, shuffle=False), 20)) == TEXTS


def test_rows_of_neighbouring_chunks_are_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "JSONL_CHUNK", 100)
    source = corpora.write(tmp_path, "jsonl", [str(index) for index in range(1000)])
    order = np.asarray([int(text) for text in texts(islice(stream(source), 1000))])
    assert sorted(order) == list(range(1000))
    assert np.median(abs(np.diff(order))) > 100


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_files_that_the_datasets_library_loads(tmp_path, kind):
    folder = tmp_path / "files"
    if kind == "csv":
        folder.mkdir()
        (folder / "a.csv").write_text("text,n\nab,1\ncd,2\n")
    else:
        corpora.write(folder, kind, ["ab", "cd"])
    source = Source(path=str(folder), format="datasets")
    assert texts(islice(stream(source, shuffle=False), 2)) == ["ab", "cd"]


def test_a_split_is_named(tmp_path):
    import datasets

    parts = {name: datasets.Dataset.from_dict({"body": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    source = Source(path=str(tmp_path / "both"), format="datasets", field="body", split="test")
    assert texts(islice(stream(source), 1)) == ["test"]
    with pytest.raises(ValueError, match="has no split 'other': it has train, test"):
        stream(source.model_copy(update={"split": "other"}))
    one = corpora.write(tmp_path / "one", "datasets", ["a"])
    with pytest.raises(ValueError, match=r"data: split = 'train' but path = '.*one' has no splits: leave it out"):
        stream(one.model_copy(update={"split": "train"}))
    assert texts(islice(stream(one), 1)) == ["a"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_pattern_beside_one_file_is_refused(tmp_path, kind):
    corpora.write(tmp_path, kind, ["a"])
    (file,) = tmp_path.iterdir()
    source = Source(path=str(file), format=kind)
    assert texts(islice(stream(source), 1)) == ["a"]
    with pytest.raises(ValueError, match=r"data: pattern = '\*' is given but path = '.*' is one file: leave it out"):
        stream(source.model_copy(update={"pattern": "*"}))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.2, 0.7)])
def test_a_mixture_keeps_its_weights_in_tokens(tmp_path, weights):
    listed = [
        corpora.write(tmp_path / str(index), "jsonl", corpora.texts_of(30, seed=index, longest=longest), weight=weight)
        for index, (weight, longest) in enumerate(zip(weights, (20, 200), strict=True))
    ]
    counts = np.zeros(2)
    for piece in islice(stream(*listed), 2000):
        counts[piece.place.source] += len(piece.ids)
    assert counts / counts.sum() == pytest.approx(np.asarray(weights) / sum(weights), abs=600 / counts.sum())


def test_R54_a_mixture_follows_the_seed_alone(tmp_path):
    listed = [corpora.write(tmp_path / kind, kind, TEXTS) for kind in ("jsonl", "parquet")]
    first, again, other = (texts(islice(stream(*listed, seed=seed), 60)) for seed in (0, 0, 1))
    assert first == again != other
    of_one = [p.place.row + 100 * p.place.chunk for p in islice(stream(*listed), 40) if p.place.source == 0]
    of_two = [p.place.row + 100 * p.place.chunk for p in islice(stream(*listed), 40) if p.place.source == 1]
    assert of_one[:15] != of_two[:15]


def line(value):
    return json.dumps(value).encode() + b"\n"


GOOD = line({"text": "ab"})
BAD = {
    "not JSON": (GOOD + b"\n" + b"{'text': 1}\n", r"a.jsonl, line 3: not JSON \(.* at character 1 of the line\)"),
    "not UTF-8": (GOOD + b'{"text": "\xff"}\n', r"a.jsonl, line 2: not UTF-8 text \(invalid start byte at byte 10"),
    "a list": (line([1]), r"a.jsonl, line 1: a JSON object was expected, found list"),
    "missing": (GOOD * 9 + line({"body": "x", "n": 1}), r"line 10: the field 'text' is missing: there are body, n"),
    "null": (GOOD + line({"text": None}), r"line 2: the field 'text' is null"),
    "a number": (GOOD + line({"text": 3}), r"line 2: a text was expected, found int"),
    "surrogate": (GOOD + b'{"text": "a\\ud800"}\n', r"line 2: half of a surrogate pair at character 1"),
    "deep": (GOOD + b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", r"line 2: not JSON that can be read"),
    "blank": (b"\n\n\n", r"a source of \[data\] holds no document: 1 chunk\(s\) were read"),
    "empty": (b"", r"a.jsonl is empty: at least one document was expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path, case):
    content, message = BAD[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(islice(stream(Source(path=str(tmp_path), format="jsonl"), shuffle=False), 20))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_source_of_empty_documents_ends_with_its_first_epoch(tmp_path, kind):
    """A step on them would have no loss, and would go on to decay the weights."""
    empty = stream(corpora.write(tmp_path / "empty", kind, [""] * 40))
    with pytest.raises(ValueError, match=r"source 0 of \[data\] holds nothing to train on: all of its documents are"):
        list(islice(empty, 41))
    some = stream(corpora.write(tmp_path / "some", kind, [""] * 40 + ["ab"]))
    for _ in range(3):
        next(some)
    assert len(list(islice(some.at(some.state()), 120))) == 120


def test_a_bad_line_far_inside_a_file_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "JSONL_CHUNK", 64)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 500 + b"{\n" + GOOD * 500)
    with pytest.raises(ValueError, match=r"a.jsonl, line 501: not JSON"):
        list(islice(stream(Source(path=str(tmp_path), format="jsonl")), 1001))


def test_bad_parquet_is_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    source = corpora.write(tmp_path, "parquet", ["a", "b", None, "d", "e", "f"])
    with pytest.raises(ValueError, match=r"0.parquet, row 2: the field 'text' is null"):
        list(islice(stream(source), 6))
    with pytest.raises(ValueError, match=r"0.parquet has no column 'body': it has text"):
        stream(source.model_copy(update={"field": "body"}))
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"1.parquet is empty: at least one document was expected"):
        stream(source)
    (tmp_path / "0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"0.parquet cannot be read as Parquet"):
        stream(source)


def test_a_bad_dataset_is_named(tmp_path):
    source = corpora.write(tmp_path / "saved", "datasets", ["a", None])
    with pytest.raises(ValueError, match=r"saved, row 1: the field 'text' is null"):
        list(islice(stream(source), 2))
    with pytest.raises(ValueError, match=r"saved has no column 'body': it has text"):
        stream(source.model_copy(update={"field": "body"}))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"nothing' cannot be loaded by the datasets library"):
        stream(Source(path=str(tmp_path / "nothing"), format="datasets"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("closed", [False, True])
def test_token_ids_are_what_the_text_would_be(tmp_path, kind, closed):
    ids = [[*text.encode(), *[ByteTokenizer.end] * closed] for text in TEXTS]
    texts_, tokens = (
        islice(stream(source, shuffle=False, length=50), 60)
        for source in (
            corpora.write(tmp_path / "text", "text", TEXTS),
            corpora.write(tmp_path / "ids", kind, ids, field="ids", tokens=True),
        )
    )
    for got, want in zip(tokens, texts_, strict=True):
        assert got.ids.dtype == got.labels.dtype == np.int64
        assert got.ids.tolist() == want.ids.tolist()
        assert got.labels.tolist() == want.labels.tolist()


BAD_IDS = {
    "too large": ([1, 258], "token id 258: data.tokenizer has the ids 0 to 257"),
    "negative": ([1, -1], "token id -1: data.tokenizer has the ids 0 to 257"),
    "fractions": ([1.0, 2.0], r"a list of token ids was expected, found one of float64 in 1 dimension\(s\)"),
    "nested": ([[1], [2]], r"a list of token ids was expected, found one of int64 in 2 dimension\(s\)"),
    "booleans": ([True, False], "a list of token ids was expected, found one of bool in 1"),
    "null inside": ([1, None], "a list of token ids was expected, found one of object in 1"),
    "text": ("ab", "a list of token ids was expected, found str"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_token_ids_are_named(tmp_path, case):
    ids, message = BAD_IDS[case]
    (tmp_path / "a.jsonl").write_bytes(line({"ids": []}) + line({"ids": ids}))
    source = Source(path=str(tmp_path), format="jsonl", field="ids", tokens=True)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}"):
        list(islice(stream(source, shuffle=False), 2))


def test_null_among_the_token_ids_of_a_column_is_named(tmp_path):
    source = corpora.write(tmp_path, "parquet", [[1, 2], [1, None]], field="ids", tokens=True)
    with pytest.raises(ValueError, match=r"1.parquet, row 0: a list of token ids was expected, found one of float64"):
        list(islice(stream(source, shuffle=False), 2))


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff\xfe")
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match=r"bad.txt: not UTF-8 text \(invalid start byte at byte 2\)"):
        next(stream(Source(path=str(tmp_path), format="text"), tokenizer=tokenizer))


CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_a_conversation_trains_on_the_answers_alone(tmp_path, kind):
    source = corpora.write(tmp_path / "chat", kind, [CHAT, CHAT], field="messages", chat=True)
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path / "tokenizer"))
    piece = next(stream(source, tokenizer=tokenizer))
    words = [corpora.WORDS[index] for index in piece.ids]
    assert words == ["<u>", "a", "b", "<s>", "c", "d", "</s>", "<u>", "e", "<s>", "f", "</s>"]
    targets = [corpora.WORDS[label] if label != IGNORED else "-" for label in piece.labels]
    assert targets == ["-", "-", "-", "c", "d", "</s>", "-", "-", "-", "f", "</s>", "-"]


def test_labels_of_a_conversation_survive_the_cut(tmp_path):
    source = corpora.write(tmp_path / "chat", "jsonl", [CHAT], field="messages", chat=True)
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path / "tokenizer"))
    whole = next(stream(source, tokenizer=tokenizer))
    parts = list(islice(stream(source, tokenizer=tokenizer, length=5), 3))
    assert np.concatenate([part.labels for part in parts]).tolist() == whole.labels.tolist()


BAD_CHAT = {
    "no list": ("hello", "a list of messages, each with a role, was expected"),
    "no role": ([{"content": "a"}], "a list of messages, each with a role, was expected"),
    "empty": ([], "a list of messages was expected, found an empty one"),
    "no answer": (CHAT[:1], "no message is an answer of the assistant"),
    "template": ([{"role": "system", "content": "a"}], "the chat template refuses these messages: no system"),
}


@pytest.mark.parametrize("case", BAD_CHAT)
def test_a_bad_conversation_is_named(tmp_path, case):
    messages, message = BAD_CHAT[case]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path / "t", template=refusing + corpora.TEMPLATE))
    (tmp_path / "a.jsonl").write_bytes(line({"messages": CHAT}) + line({"messages": messages}))
    source = Source(path=str(tmp_path), format="jsonl", field="messages", chat=True)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}"):
        list(islice(stream(source, tokenizer=tokenizer), 2))


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no single chat template"), ("{{ messages[0].content }}", "does not mark the answers: put {% gener")],
)
def test_a_template_that_marks_no_answers_is_refused(tmp_path, template, message):
    source = corpora.write(tmp_path / "chat", "jsonl", [CHAT], field="messages", chat=True)
    tokenizer = FolderTokenizer(corpora.folder_tokenizer(tmp_path / "t", template=template))
    with pytest.raises(ValueError, match=message):
        stream(source, tokenizer=tokenizer)
