"""Checkpoints of any mesh and stage as folders that transformers and peft load, with the same weights and logits."""

from __future__ import annotations

import json
import shutil
from unittest.mock import patch

import pytest
import saving
import torch
import training
from conftest import error
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

import ringflash
from train import export, loop, lora, model, weights
from train.config import Config

STRETCHED = {"type": "linear", "factor": 4.0}
ROPE = {"type": "dynamic", "factor": 2.0, "original_length": 24}
TIED = training.LLAMA | {"tie_word_embeddings": True}
# name -> family of the folder it starts from or None, mesh, ZeRO, other keys
RUNS = {
    "llama": ("llama", (2, 1, 1), 0, {}),
    "tied-bf16": (None, (1, 2, 1), 2, {"model": {"architecture": "llama", "config": TIED, "dtype": "bfloat16"}}),
    "dynamic": (None, (1, 2, 1), 1, {"model": {"architecture": "llama", "config": training.LLAMA, "rope": ROPE}}),
    "experts": ("qwen3_moe", (1, 2, 1), 3, {}),
    "lora": ("llama", (1, 2, 1), 3,
             {"lora": training.LORA, "train": {"trainable": "lora"}, "model": {"rope": STRETCHED}}),
}  # fmt: skip


def trained(config):
    """Body: one step, saved; the weights of rank 0, whether a run that resumes has the same, tensors read by each."""
    results, real, read = [], weights.Folder.read, [[], []]

    def reading(folder, name):
        read[len(results)].append(name)
        return real(folder, name)

    with patch.object(weights.Folder, "read", reading):
        for _ in range(2):
            run = loop.prepare(config, training.join(config))
            if not results:
                loop.fit(run)
            results.append(run.engine.full_parameters())
            run.engine.close()
    same = all(torch.equal(weight, results[1][name]) for name, weight in results[0].items())
    named = {name.removeprefix("decoder."): weight for name, weight in results[0].items()}
    return named, same, [len(names) for names in read]


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """name -> (config, weights after a step, folder of the checkpoint)"""
    texts = training.write_texts(tmp_path_factory.mktemp("texts"))
    made = {}
    for name, (family, mesh, zero, changes) in RUNS.items():
        given = {"mesh": mesh, "zero": zero, "optimizer": "adamw", "checkpoint": {"every": 1}, **changes}
        given["train"] = {"name": name, "steps": 1, "global_batch": 4, "self_test": False} | given.get("train", {})
        if family is None:
            config = training.config_of(texts, **given)
        else:
            folder = training.save_model(family, tmp_path_factory.mktemp(family))
            (folder / "tokenizer.json").write_text("{}")
            (folder / "code.py").write_text("")
            config = training.pretrained(folder, texts, **given)
        after, same, (first, again) = pool(2)(trained, config)[0]
        assert same, f"{name} resumes with other weights"
        assert bool(first) == (family is not None)
        assert again == (first if name == "lora" else 0), "weights that a checkpoint holds are not read before"
        made[name] = config, after, config.checkpoint_dir / "step-00000001"
    return made


@pytest.mark.parametrize("name", [name for name in RUNS if name != "lora"])
def test_R82_from_pretrained_has_the_weights_and_the_logits(runs, tmp_path, name):
    config, weights, path = runs[name]
    export.export(path, tmp_path / "out", shard_bytes=40_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert got.dtype is model.DTYPES[config.model.dtype]
    assert {key for key, _ in got.named_parameters()} == weights.keys()
    for key, parameter in got.named_parameters():
        assert torch.equal(parameter, weights[key]), key
    assert (got.lm_head.weight is got.model.embed_tokens.weight) == (name == "tied-bf16")
    used = model.config_of(config.model, training.LENGTH)
    want = AutoModelForCausalLM.from_config(used, dtype=model.DTYPES[config.model.dtype]).eval()
    want.load_state_dict(weights, strict=name != "tied-bf16")
    assert torch.equal(got(training.tokens()).logits, want(training.tokens()).logits)
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["rope_parameters"]["rope_type"] == "default"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file() == (config.model.pretrained is not None)
    assert not list((tmp_path / "out").glob("*.py")) and not list(tmp_path.glob("*.partial"))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").glob("*.safetensors")}
    assert modes == {(tmp_path / "out").stat().st_mode & 0o666}  # a team reads them


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for the old name
def test_an_adapter_is_loaded_by_peft_and_gives_the_logits(runs, tmp_path):
    config, weights, path = runs["lora"]
    export.export(path, tmp_path / "out")
    saved = [key for key in FileSystemReader(path).read_metadata().state_dict_metadata if "decoder." in key]
    assert len(saved) == 3 * 8 and all(lora.is_adapter(key) for key in saved), "weights and two moments of adapters"
    trained_with = AutoConfig.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(config.model.pretrained, config=trained_with)
    got = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    for key, parameter in got.named_parameters():
        assert torch.equal(parameter, weights[key.removeprefix("base_model.model.")]), key
    adapters = [weight for key, weight in weights.items() if lora.is_adapter(key)]
    assert len(adapters) == 8 and all(weight.any() for weight in adapters)
    ring = ringflash.Ring()
    ringflash.hf.register(ring, name=model.ATTENTION)
    ours = model.build(config, torch.device("cpu"))
    ours.decoder.load_state_dict(weights)
    want = ours(training.tokens(), None, ring.layout(training.LENGTH))
    assert error(want, got(training.tokens()).logits) <= 1e-5
    untold = PeftModel.from_pretrained(training.from_folder(config.model.pretrained), tmp_path / "out").eval()
    assert error(want, untold(training.tokens()).logits) > 1e-3, "the base folder's own frequencies are others"


def test_adapters_go_on_beside_their_base_wherever_it_is_and_beside_no_other(pool, runs, tmp_path):
    config = runs["lora"][0]
    moved = shutil.copytree(config.model.pretrained, tmp_path / "moved")
    tables = config.model_dump(exclude_unset=True)
    tables["model"]["pretrained"] = str(moved)
    again = Config.model_validate(tables)
    assert pool(2)(saving.refusal, again) == ["it started"] * 2
    file = sorted(moved.glob("*.safetensors"))[0]
    save_file({name: tensor * 1.001 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    for said in pool(2)(saving.refusal, again):
        assert f"holds adapters of model.pretrained = {config.model.pretrained!r} (fingerprint " in said
        assert f"this run has {str(moved)!r} (fingerprint " in said


def test_the_command_says_what_it_did_or_why_not(runs, tmp_path, capsys):
    path, out = runs["llama"][2], tmp_path / "out"
    assert export.main([str(path), str(out)]) == 0
    assert (out / "model.safetensors").is_file()
    assert export.main([str(path), str(out)]) == 2
    assert "is there and not empty" in capsys.readouterr().err
    torn = shutil.copytree(path, tmp_path / "step-00000001")
    (torn / "manifest.json").unlink()
    assert export.main([str(torn), str(tmp_path / "other")]) == 2
    assert "is no whole checkpoint: it has no manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("fault", ["zeros", "no weights", "no config"])
def test_what_cannot_be_exported_is_said_in_a_sentence_and_leaves_nothing(runs, tmp_path, capsys, fault):
    broken = shutil.copytree(runs["llama"][2], tmp_path / "step-00000001")
    manifest = json.loads((broken / "manifest.json").read_text())
    if fault == "zeros":
        for file in broken.glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
    elif fault == "no weights":
        manifest["config"]["model"]["config"]["num_hidden_layers"] += 1
    else:
        del manifest["config"]["model"]
    (broken / "manifest.json").write_text(json.dumps(manifest))
    assert export.main([str(broken), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    wanted = {"zeros": "a file in it is broken", "no weights": "decoder.model.layers.", "no config": "no 'model' in"}
    assert said.startswith("ringflash: ") and wanted[fault] in said and "weights_only" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_nothing_is_exported_into_a_checkpoint(runs, capsys):
    path = runs["llama"][2]
    assert export.main([str(path), str(path / "out")]) == 2
    assert "lies in the checkpoint, and would be removed with it" in capsys.readouterr().err
