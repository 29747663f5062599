"""Runs that start from a folder of transformers: what they compute, what of it each rank holds, what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import training
from conftest import error
from safetensors.torch import load_file, save_file

import ringflash
from train import engine, model, weights
from train.config import ConfigError, check_paths, heads, resolve


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> a folder with a random model in several shards, as transformers saves it."""
    return {family: training.save_model(family, tmp_path_factory.mktemp(family)) for family in training.FAMILIES}


@pytest.mark.parametrize("family", training.FAMILIES)
def test_a_folder_gives_the_logits_of_transformers(folders, family):
    ring = ringflash.Ring()
    ringflash.hf.register(ring, name=model.ATTENTION)
    built = model.build(training.pretrained(folders[family], data={"path": "stdlib"}), torch.device("cpu"))
    ids = torch.randint(260, (1, training.LENGTH), generator=torch.Generator().manual_seed(1))
    want = training.from_folder(folders[family])
    assert error(built(ids, None, ring.layout(training.LENGTH)), want(ids).logits) <= 1e-5
    got, expected = dict(built.decoder.named_parameters()), dict(want.named_parameters())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())


def test_R60_R115_training_from_a_folder_equals_one_process(pool, texts, folders):
    """Ring 1 and 2, ZeRO 0 to 3; the first loss is that of transformers' own model."""
    for family, mesh, zero in [("llama", (1, 2, 1), 0), ("llama", (2, 1, 1), 3), ("qwen3_moe", (1, 2, 1), 3)]:
        config = training.pretrained(folders[family], texts, mesh=mesh, zero=zero)
        got = pool(2)(training.train, config, "sparse")[0]
        want = training.train_alone(config, "sparse", training.from_folder(folders[family]))
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5), family
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5), family
        for name, weight in want["weights"].items():
            assert error(got["weights"][name], weight) <= 1e-5, (family, name)


def held(config):
    """Body: the most numbers that this rank held whole at one time while a model was built, and those of the model."""
    joined = training.join(config)
    ringflash.hf.register(joined.ring, name=model.ATTENTION)
    cut, whole = engine.cutter(config, config.batch(joined.size)), []

    def watched(module):
        whole.append(sum(parameter.numel() for parameter in module.parameters(recurse=False)))
        cut(module)

    built = model.build(config, torch.device("cpu"), watched)
    kept = sum(parameter.ds_tensor.numel() for parameter in built.parameters())
    assert all(parameter.numel() == 0 for parameter in built.parameters())
    return max(whole), kept, sum(parameter.ds_numel for parameter in built.parameters())


def test_at_zero_3_no_rank_holds_the_whole_model(pool, texts, folders):
    """With weights of a folder, and with random ones."""
    table = training.LLAMA | {"num_hidden_layers": 6}
    for given in ({"pretrained": str(folders["llama"])}, {"architecture": "llama", "config": table}):
        config = resolve(training.config_of(texts, mesh=(1, 2, 1), zero=3, model={"dtype": "float32"} | given))
        for largest, kept, numel in pool(2)(held, config):
            assert largest == training.LLAMA["vocab_size"] * training.LLAMA["hidden_size"]
            assert kept <= numel / 2 + 50


@pytest.fixture
def copied(folders, tmp_path):
    """A copy of the llama's folder, to be spoilt."""
    return shutil.copytree(folders["llama"], tmp_path / "model")


def change(folder, **keys):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | keys))


def drop(folder, name):
    """Take a tensor out of its shard and of the index."""
    index = json.loads((folder / weights.INDEX).read_text())
    file = folder / index["weight_map"].pop(name)
    tensors = load_file(file)
    tensor = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / weights.INDEX).write_text(json.dumps(index))
    return tensor, index


SPOILT = {
    "no folder": (
        lambda f: shutil.rmtree(f),
        "is not a folder: a local one with config.json and safetensors is accepted",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "its config.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "its config.json holds no table but list"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "its config.json cannot be read"),
    "deep index": (lambda f: (f / weights.INDEX).write_text("[" * 10**5), f"its {weights.INDEX} cannot be read"),
    "family": (lambda f: change(f, model_type="mixtral"), "model_type = 'mixtral'; accepted is llama, qwen2"),
    "pictures": (lambda f: change(f, model_type="gemma3"), "'gemma3': save its text part alone, as gemma3_text"),
    "code": (lambda f: change(f, auto_map={"AutoConfig": "x.Y"}), r"brings code of its own \(auto_map\)"),
    "quantized": (lambda f: change(f, quantization_config={}), "holds quantized weights"),
    "dropout": (lambda f: change(f, attention_dropout=0.1), "attention_dropout = 0.1: attention over a ring has no"),
    "shape": (lambda f: change(f, head_dim=20), "model.config.head_dim = 20"),
    "pickled": (
        lambda f: ([p.unlink() for p in f.glob("*.safetensors*")], (f / "pytorch_model.bin").write_bytes(b"")),
        "safetensors are accepted, it has pytorch_model.bin, which could run code",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_folder_that_cannot_be_trained_is_refused_before_any_gpu(copied, texts, case):
    spoil, message = SPOILT[case]
    spoil(copied)
    with pytest.raises(ConfigError, match=f"^model.pretrained = .*{message}"):
        check_paths(training.config_of(texts, model={"pretrained": str(copied), "dtype": "float32"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"architecture": "qwen3"}, "model.architecture = 'qwen3', but .* holds 'llama'"),
        ({"config": {"num_hidden_layers": 1}}, "num_hidden_layers = 1 does not fit the weights .* have 2"),
        ({"config": {"rms_norm_ep": 1.0}}, "rms_norm_ep is not a key of .*/config.json: did you mean 'rms_norm_eps'"),
    ],
)
def test_R110_an_override_that_the_weights_do_not_fit(folders, given, message):
    with pytest.raises(ConfigError, match=message):
        training.pretrained(folders["llama"], model=given)


def lack(folder):
    drop(folder, "model.norm.weight")


def add(folder):
    save_file({"extra": torch.zeros(2)}, folder / "extra.safetensors")
    index = json.loads((folder / weights.INDEX).read_text())
    index["weight_map"]["extra"] = "extra.safetensors"
    (folder / weights.INDEX).write_text(json.dumps(index))


def tear(folder):
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


TENSORS = {
    "missing": (lack, "lacks model.norm.weight$"),
    "unexpected": (add, "holds what the model has no place for: extra$"),
    "another shape": (
        lambda f: change(f, intermediate_size=64),
        r"(gate_proj.weight is \[48, 32\], .* \[64, 32\]|down_proj.weight is \[32, 48\], .* \[32, 64\])",
    ),
    "tied": (lambda f: change(f, tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
    "torn": (tear, "cannot be read: "),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_the_model_s_are_refused_by_name(copied, texts, case):
    """From the heads of the files, before any process is started; and by the model, which knows all of its names."""
    spoil, message = TENSORS[case]
    spoil(copied)
    if case != "unexpected":
        with pytest.raises(ConfigError, match=message):
            check_paths(training.config_of(texts, model={"pretrained": str(copied), "dtype": "float32"}))
    config = training.pretrained(copied, data={"path": "stdlib"})
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    with pytest.raises(ValueError, match=message):
        model.build(config, torch.device("cpu"))


@pytest.mark.parametrize("family", training.FAMILIES)
def test_each_tensor_of_a_family_is_missed_before_any_gpu(folders, texts, monkeypatch, family):
    config = training.config_of(texts, model={"pretrained": str(folders[family]), "dtype": "float32"})
    check_paths(config)
    whole = heads.read(folders[family])
    assert {name: head.shape for name, head in whole.items()} == {
        name: tuple(weights.Folder(folders[family]).shape(name)) for name in weights.Folder(folders[family])
    }
    for name in whole:
        monkeypatch.setattr(heads, "read", lambda _, name=name: {k: head for k, head in whole.items() if k != name})
        with pytest.raises(ConfigError, match=rf"lacks {name}$"):
            check_paths(config)


def test_layers_to_adapt_are_known_before_any_gpu(folders, texts):
    given = {"model": {"pretrained": str(folders["qwen3_moe"]), "dtype": "float32"}, "train": {"trainable": "lora"}}
    given["train"] |= {"name": "tiny", "steps": 2}
    check_paths(training.config_of(texts, lora={"targets": ["q_proj", "lm_head"]}, **given))
    for target in ("qproj", "gate", "embed_tokens", "up_proj"):
        with pytest.raises(ConfigError, match=rf"'{target}', .* accepted is k_proj, lm_head, o_proj, q_proj, v_proj$"):
            check_paths(training.config_of(texts, lora={"targets": [target]}, **given))


def test_a_fingerprint_is_that_of_the_numbers_wherever_they_lie(folders, copied):
    want = heads.fingerprint(folders["llama"])
    assert heads.fingerprint(copied) == want
    tensors = {name: weights.Folder(copied).read(name) for name in weights.Folder(copied)}
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, copied / weights.SINGLE, metadata={"format": "pt"})
    assert heads.fingerprint(copied) == want, "in one file"
    for change in (
        lambda: tensors["model.norm.weight"].add_(1e-6),
        lambda: tensors["model.layers.0.mlp.gate_proj.weight"].view(-1)[-1].mul_(2),
        lambda: tensors.update(extra=torch.zeros(1)),
    ):
        change()
        save_file(tensors, copied / weights.SINGLE, metadata={"format": "pt"})
        assert heads.fingerprint(copied) != want
        want = heads.fingerprint(copied)


def test_an_override_and_an_old_buffer_are_let_pass(copied, texts):
    index = json.loads((copied / weights.INDEX).read_text())
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, copied / "old.safetensors")
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = "old.safetensors"
    (copied / weights.INDEX).write_text(json.dumps(index))
    config = training.pretrained(copied, texts, model={"config": {"rms_norm_eps": 1e-3}})
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    assert model.build(config, torch.device("cpu")).decoder.config.rms_norm_eps == 1e-3
