"""Bodies that the tests of the trainer send to a pool of processes, and what one process with plain torch makes of the
same batches: each document alone, transformers' own attention, no DeepSpeed."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ringflash
from ringflash import travel
from train import data, engine, loop, model, probe, weights, world
from train.config import Config, resolve
from train.engine import learning_rate, optimizer_of

LENGTH = 64
GLOBAL_BATCH = 4
STEPS = 2

LLAMA = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}

# family -> what differs from LLAMA
FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen2": {"hidden_size": 64},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
    },
}  # fmt: skip

LORA = {"rank": 3, "alpha": 6, "targets": ["q_proj", "down_proj"]}

OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "warmup_steps": 2, "schedule": "linear"},
    "adamw": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "min_lr": 1e-4},
}


def config_of(
    folder: Path | str,
    *,
    mesh: tuple[int, int, int] = (1, 1, 1),
    zero: int = 0,
    optimizer: Any = "sgd",
    steps: int = STEPS,
    **changes: Any,
) -> Config:
    """A tiny run over mesh = (data, ring, ulysses). optimizer: one of OPTIMIZERS, or keys; changes: section -> keys."""
    data_size, ring_size, ulysses = mesh
    tables: dict[str, Any] = {
        "model": {"architecture": "llama", "dtype": "float32", "config": LLAMA},
        "data": {"path": str(folder)},
        "sequence": {"length": LENGTH, "layout": "zigzag"},
        "parallel": {"ring": ring_size, "ulysses": ulysses, "data": data_size, "zero": zero},
        "optimizer": OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        "train": {"name": "tiny", "steps": steps, "global_batch": GLOBAL_BATCH, "seed": 3, "self_test": False},
        "memory": {"checkpoint": "selective", "loss_chunk": 5},
        "metrics": {"wandb": "disabled", "dir": str(folder)},
        "launch": {"processes_per_node": data_size * ring_size * ulysses},
    }
    for section, keys in changes.items():
        tables[section] = ({} if "pretrained" in keys else tables.get(section, {})) | keys
    return Config.model_validate(tables)


def tokens(length: int = LENGTH) -> torch.Tensor:
    """[1, length] for the vocabulary of LLAMA, the same on every process."""
    return torch.randint(LLAMA["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))


def save_model(family: str, folder: Path) -> Path:
    """A random model of a family in several shards, as transformers saves it."""
    table = {key: value for key, value in (LLAMA | FAMILIES[family]).items() if (family, key) != ("qwen2", "head_dim")}
    torch.manual_seed(11)
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **table))
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms and biases too
    saved.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / weights.INDEX).is_file()
    return folder


def pretrained(folder: Path, texts: Path | str = ".", **changes: Any) -> Config:
    """A tiny run that starts from a folder. changes: as for `config_of`."""
    given = {"pretrained": str(folder), "dtype": "float32"} | changes.pop("model", {})
    return resolve(config_of(texts, **changes, model=given))


def from_folder(folder: Path) -> Any:
    """The model of a folder as transformers makes it."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def write_texts(folder: Path) -> Path:
    """Documents of 1 to 150 bytes, some longer than a sequence, one empty."""
    generator = np.random.default_rng(5)
    for index, size in enumerate([0, *generator.integers(1, 150, 30).tolist()]):
        letters = generator.choice(list(b"abcdefgh \n"), size).astype(np.uint8)
        (folder / f"{index:02}.txt").write_bytes(letters.tobytes())
    return folder


def sequences_of(config: Config) -> Any:
    """The stream of packed sequences of a run."""
    tokenizer = data.tokenizer_of(config.data, LLAMA["vocab_size"])
    return data.sequences(config.data, tokenizer, length=LENGTH, seed=config.train.seed)


class Played:
    """Sequences that were made before, as a Packer gives them."""

    def __init__(self, sequences: Any) -> None:
        self._sequences = sequences

    def __next__(self) -> data.Sequence:
        return next(self._sequences)

    def state(self) -> dict[str, Any]:
        return {}


def batches_of(config: Config, labels: str) -> list[list[data.Sequence]]:
    """The global batches of all steps, with the labels of a case kept.

    sparse: nine of ten labels are ignored in the first sequence (one rank's, if data is split) and in the first and
        last eighth of the others (one rank's, in a zigzag of 4); one: a single label is left in the whole batch
    mixed: the one and the other in turns; none: no label at all
    """
    stream = sequences_of(config)
    batches = [[next(stream) for _ in range(GLOBAL_BATCH)] for _ in range(config.train.steps)]
    kinds = ["sparse", "one"] * len(batches) if labels == "mixed" else [labels] * len(batches)
    return [[_ignore(s, kind, index) for index, s in enumerate(b)] for b, kind in zip(batches, kinds, strict=False)]


def _ignore(sequence: data.Sequence, kind: str, index: int) -> data.Sequence:
    position = np.arange(LENGTH)
    valid = np.flatnonzero(sequence.labels != data.IGNORED)
    keep = {
        "all": np.ones(LENGTH, bool),
        "none": np.zeros(LENGTH, bool),
        "one": (position == valid[len(valid) // 2]) & (index == 2),
        "sparse": (position % 10 == 3) | ((index > 0) & (position >= LENGTH // 8) & (position < 7 * LENGTH // 8)),
    }[kind]
    return replace(sequence, labels=np.where(keep, sequence.labels, data.IGNORED))


@functools.cache
def joined(parallel: str, layout: str, size: int) -> world.World:
    """The groups of a mesh, made once in each process. parallel: the section as JSON, without the ZeRO stage."""
    keys = json.loads(parallel)
    mesh = size // (keys["ring"] * keys["ulysses"]), keys["ring"], keys["ulysses"]
    config = config_of(".", mesh=mesh, sequence={"length": LENGTH, "layout": layout}, parallel=keys)
    return world.connect(config, device())


def device() -> torch.device:
    """Where this process of a pool computes: the GPU of an NCCL world, or the CPU."""
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu")


def join(config: Config) -> world.World:
    if device().type == "cuda":
        torch.use_deterministic_algorithms(config.train.deterministic)
    parallel = config.parallel.model_dump_json(exclude={"zero", "data"})
    return joined(parallel, config.sequence.layout, config.world_size)


def train(config: Config, labels: str) -> dict[str, Any]:
    """Body: train on `batches_of`, through the trainer. Weights come back from rank 0, their digest from all."""
    run = loop.prepare(config, join(config))
    windows = data.Windows(
        Played(iter([sequence for batch in batches_of(config, labels) for sequence in batch])),
        run.batch,
        data_rank=run.world.data_rank,
        data_size=run.world.data_size,
    )
    run = replace(run, windows=windows)
    records = [loop.train_step(run, step, tokens_seen=0) for step in range(1, config.train.steps + 1)]
    weights = {name.removeprefix("decoder."): w.cpu() for name, w in run.engine.full_parameters().items()}
    run.engine.close()
    digest = hashlib.sha256(b"".join(w.float().numpy().tobytes() for w in weights.values())).hexdigest()
    return {
        "loss": [record.loss_sum / max(record.valid_tokens, 1) for record in records],
        "grad_norm": [record.grad_norm for record in records],
        "records": records,
        "digest": digest,
        "weights": weights if run.world.rank == 0 else None,
    }


def train_in_buckets(config: Config, labels: str, numel: int, overlap: bool = False) -> dict[str, Any]:
    """Body: `train`, whose gradients are reduced in buckets of so many numbers, beside the backward if `overlap`."""
    table = engine.deepspeed_config

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        made = table(*args, **options)
        made["zero_optimization"] |= {"reduce_bucket_size": numel, "overlap_comm": overlap}
        return made

    with patch.object(engine, "deepspeed_config", changed):
        return train(config, labels)


def train_without_triton(config: Config, labels: str) -> dict[str, Any]:
    """Body: `train`, where no module of Triton is loaded and none can be."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    for name in loaded:
        del sys.modules[name]
    sys.modules["triton"] = None  # its import raises
    try:
        return train(config, labels)
    finally:
        del sys.modules["triton"]
        sys.modules.update(loaded)


def held(config: Config, steps: tuple[int, ...]) -> list[dict[str, Any]]:
    """Body: a run; what this process holds at the start of these steps, in numbers."""
    run, step, seen = loop.prepare(config, join(config)), loop.train_step, []

    def counting(run: loop.Run, number: int, **options: Any) -> Any:
        if number in steps:
            run.saver.wait()
            gc.collect()
            tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
            seen.append(
                {
                    "groups": len(torch.distributed.distributed_c10d._world.pg_map),
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "tensors": len(tensors),
                    "bytes": sum(one.numel() * one.element_size() for one in tensors),
                    "bytes on the GPU": torch.cuda.memory_allocated() if run.world.device.type == "cuda" else 0,
                }
            )
        return step(run, number, **options)

    with patch.object(loop, "train_step", counting):
        loop.fit(run)
    run.engine.close()
    return seen


def train_alone(config: Config, labels: str, decoder: Any = None, *, device: str = "cpu") -> dict[str, Any]:
    """The same steps in this process in fp32, without ring, DeepSpeed, packing or chunks.

    decoder: left out, random weights, drawn in the type of the config
    """
    torch.manual_seed(config.train.seed)
    dtype = model.DTYPES[config.model.dtype]
    decoder = decoder or model.build_decoder(
        model.config_of(config.model, LENGTH), dtype=dtype, attention="eager", device=torch.device(device)
    )
    decoder = decoder.float()
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(trained, config.optimizer)
    result: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step, batch in enumerate(batches_of(config, labels), 1):
        valid = max(sum(sequence.valid_targets for sequence in batch), 1)
        documents = config.data.document_mask
        loss = sum(_loss_alone(decoder, sequence, documents=documents) for sequence in batch) / valid
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        if config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.optimizer, steps=config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
    result["weights"] = {name: w.detach().cpu().clone() for name, w in decoder.named_parameters()}
    return result


def _loss_alone(decoder: Any, sequence: data.Sequence, *, documents: bool) -> torch.Tensor:
    """The sum of the losses of a packed sequence, each document on its own, or all of it as one."""
    total = torch.zeros((), device=decoder.device)
    borders = sequence.cu_seqlens if documents else [0, sequence.cu_seqlens[-1]]
    for start, stop in pairwise(borders):
        ids, labels = (torch.from_numpy(x[start:stop]).to(total.device) for x in (sequence.ids, sequence.labels))
        logits = decoder(ids[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=data.IGNORED, reduction="sum")
    return total


def probe_gradient(config: Config, fault: str | None) -> str | None:
    """Body: what the gradient probe says of an engine that scales the loss by the ring, or loses a rank's gradient."""
    joined_world = join(config)
    backward = engine.Engine.backward

    def faulty(self: engine.Engine, loss_sum: torch.Tensor, *, valid_targets: int) -> None:
        factor = {"scaled": config.sequence_parallel, "lost": int(joined_world.rank != 1), None: 1}[fault]
        backward(self, loss_sum * factor, valid_targets=valid_targets)

    with patch.object(engine.Engine, "backward", faulty):
        return _refusal(probe.check_gradient, config, joined_world)


def probe_attention(config: Config, fault: str | None) -> str | None:
    """Body: what the attention probe says of a ring with local positions, or one whose keys are lost on the way."""
    joined_world = join(config)
    ringflash.hf.register(joined_world.ring, name=model.ATTENTION)
    with ExitStack() as faults:
        if fault == "positions":
            local = property(lambda layout: torch.arange(layout.local_len))
            faults.enter_context(patch.object(ringflash.Layout, "position_ids", local))
        if fault == "keys":
            lose = lambda record, tensors, rows, block: block.zero_()  # noqa: E731
            faults.enter_context(patch.object(travel.Record, "write", lose))
        return _refusal(probe.check_attention, config, joined_world)


def _refusal(check: Any, *args: Any, **options: Any) -> str | None:
    try:
        check(*args, **options)
    except ValueError as error:
        return str(error)
    return None


def alter(config: Config, rank: int) -> str | None:
    """Body: one step in which the batch of one rank differs by one token from that of its ring."""
    run = loop.prepare(config, join(config))
    windows = data.Windows(
        sequences_of(config), run.batch, data_rank=run.world.data_rank, data_size=run.world.data_size
    )
    window = next(windows)
    if run.world.rank == rank:
        changed = window[-1][0].ids.copy()
        changed[5] += 1
        window[-1][0] = replace(window[-1][0], ids=changed)
    refusal = _refusal(loop.train_step, replace(run, windows=iter([window])), 1, tokens_seen=0)
    run.engine.close()
    return refusal
