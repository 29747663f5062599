"""Bodies for the tests of evaluation, and what one process with plain transformers makes of the same texts."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import saving
import torch
import training

import ringflash
from train import data, loop, metrics, model, stopping
from train.config import Config
from train.data.tokens import labels_of
from train.evaluation import Evaluator, needle, standalone
from train.evaluation import score as scoring_file
from train.evaluation.needle import Haystack
from train.saver import Progress

LENGTH = 256
BORDERS = [4, 16, 64]
NEEDLE = {"lengths": [160, 250], "depths": [0.0, 0.6, 1.0], "samples": 3}


def config_of(texts: Path, held_out: Path, *, folder: Path | None = None, **changes: Any) -> Config:
    evaluation = {
        "sources": [{"path": str(held_out / part), "format": "text"} for part in ("a", "b")],
        "positions": BORDERS,
        "needle": NEEDLE,
    }
    evaluation |= changes.pop("evaluation", {})
    tables = {
        "sequence": {"length": LENGTH, "layout": "zigzag"},
        "metrics": {"dir": str(folder or texts), "wandb": "disabled"},
        "evaluation": {key: value for key, value in evaluation.items() if value is not None},
    }
    return training.config_of(texts, **(tables | changes))


def write_held_out(folder: Path) -> Path:
    """Two sources of documents of 0 to 600 bytes: some are cut, the second source ends long before the first."""
    generator = np.random.default_rng(11)
    for part, sizes in (("a", [0, 1, 600, *generator.integers(1, 200, 9)]), ("b", [256, 30])):
        (folder / part).mkdir()
        for index, size in enumerate(sizes):
            letters = generator.choice(list(b"abcdefgh \n"), int(size)).astype(np.uint8)
            (folder / part / f"{index:02}.txt").write_bytes(letters.tobytes())
    return folder


IDS_OF = Haystack.ids_of
NOISE = np.random.default_rng(2).bytes(150)


def everywhere(haystack: Haystack, text: Any) -> tuple[np.ndarray, np.ndarray]:
    """A text in which every next token is a target: of noise, a model with random weights finds some."""
    ids, _ = IDS_OF(haystack, text)
    return ids, labels_of(ids)


@patch.object(needle, "FILLER", NOISE)
@patch.object(Haystack, "ids_of", everywhere)
def evaluate(config: Config) -> list[Any]:
    """Body: two evaluations of the model as it is built, and whether it would train on."""
    joined = training.join(config)
    evaluator = Evaluator(config, joined, data.tokenizer_of(config.data, training.LLAMA["vocab_size"]))
    engine = loop.build_engine(config, joined)
    results: list[Any] = [evaluator(engine, Progress(7, 700)) for _ in range(2)]
    results.append(engine.module.training and torch.is_grad_enabled())
    engine.close()
    return results


def wide(texts: Path, held_out: Path, **changes: Any) -> Config:
    """A run long and wide enough that its activations are seen in the peak of memory."""
    table = training.LLAMA | {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 16384}
    return config_of(
        texts,
        held_out,
        model={"architecture": "llama", "dtype": "bfloat16", "config": table},
        sequence={"length": 16384, "layout": "zigzag"},
        train={"name": "wide", "steps": 2, "global_batch": 1, "self_test": False},
        memory={"checkpoint": "selective", "loss_chunk": 1024},
        evaluation={"needle": {"lengths": [16000], "depths": [0.5]}},
        **changes,
    )


def peaks(config: Config) -> tuple[int, int, int, int]:
    """Body: most bytes of the GPU in two steps of training and in the evaluation of as long sequences; its calls of the
    ring and its forward passes."""
    joined = training.join(config)
    run, found = loop.prepare(config, joined), []
    for step in (1, 2):
        loop.train_step(run, step, tokens_seen=0)
    found.append(int(loop.peak_memory(joined.device)))
    evaluator = Evaluator(config, joined, data.tokenizer_of(config.data, training.LLAMA["vocab_size"]))
    if joined.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(joined.device)
    with (
        patch.object(ringflash.ring, "forward", wraps=ringflash.ring.forward) as calls,
        patch.object(scoring_file, "_score", wraps=scoring_file._score) as passes,
    ):
        evaluator(run.engine, Progress(2, 0))
    found.append(int(loop.peak_memory(joined.device)))
    run.engine.close()
    return found[0], found[1], calls.call_count, passes.call_count


def train(config: Config, drawing_s: float = 0.0) -> dict[str, Any]:
    """Body: a whole run, from the same random states each time; drawing_s: how long rank 0 draws the first picture."""
    random.seed(1)
    np.random.seed(1)
    draw, waits = metrics.draw, iter([drawing_s])

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(next(waits, 0.0))
        draw(*args, **options)

    with patch.object(metrics, "draw", slowly):
        return saving.go(config)


def leave(config: Config, step: int) -> tuple[str | None, int]:
    """Body: a run; rank 1 gets SIGTERM in the evaluation behind this step. What it ended with, passes of that one."""
    run, real, passes = loop.prepare(config, training.join(config)), scoring_file._score, []

    def scoring(*args: Any) -> Any:
        if run.watch.step == step:
            passes.append(args)
            if run.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with patch.object(scoring_file, "_score", scoring):
        ended = loop.fit(run)
    for number in stopping.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    run.engine.close()
    return ended, len(passes)


def evaluate_checkpoint(config: Config) -> str | None:
    """Body: what `ringflash eval` does; why it was refused."""
    try:
        standalone.evaluate(config, training.join(config))
    except ValueError as error:
        return str(error)
    return None


@patch.object(needle, "FILLER", NOISE)
@patch.object(Haystack, "ids_of", everywhere)
def alone(config: Config) -> dict[str, Any]:
    """The same in this process, in fp64, each document and each text on its own, through transformers' attention.

    returns "loss": range of positions -> losses of its targets; "whole": transformers' own loss, summed; "needle":
        (length, depth) -> losses and hits of the keys' tokens
    """
    torch.manual_seed(config.train.seed)
    settings = model.config_of(config.model, LENGTH)
    decoder = model.build_decoder(settings, dtype=torch.float32, attention="eager", device=torch.device("cpu")).double()
    edges = [0, *BORDERS, LENGTH]
    found: dict[str, Any] = {"loss": {edge: [] for edge in pairwise(edges)}, "whole": 0.0, "needle": {}}
    for file in sorted(Path(config.evaluation.sources[0].path).parent.glob("*/*.txt")):
        ids = [*file.read_bytes(), 256]
        targets = [*ids[1:], data.IGNORED]
        for start in range(0, len(ids), LENGTH):
            losses, _, whole = score(decoder, ids[start : start + LENGTH], targets[start : start + LENGTH])
            found["whole"] += whole
            for position, loss in enumerate(losses):
                if targets[start + position] != data.IGNORED:
                    edge = next(edge for edge in pairwise(edges) if edge[0] <= position < edge[1])
                    found["loss"][edge].append(loss)
    haystack = Haystack(config.evaluation.needle, data.tokenizer_of(config.data, 260), sequence_length=LENGTH)
    for text in haystack.texts():
        ids, labels = haystack.ids_of(text)
        losses, hits, _ = score(decoder, ids.tolist(), labels.tolist())
        key = labels != data.IGNORED
        cell = found["needle"].setdefault((text.length, text.depth), ([], []))
        cell[0].extend(np.array(losses)[key])
        cell[1].extend(np.array(hits)[key])
    return found


def score(decoder: Any, ids: list[int], labels: list[int]) -> tuple[list[float], list[bool], float]:
    """Loss of each token, whether its label is the most likely one, and the sum that transformers gives."""
    inputs, targets = torch.tensor([ids]), torch.tensor([labels])
    with torch.no_grad():
        made = decoder(inputs, labels=inputs, shift_labels=targets, num_items_in_batch=1, use_cache=False)
    losses = torch.nn.functional.cross_entropy(made.logits[0], targets[0], reduction="none")
    hits = made.logits[0].argmax(-1) == targets[0]
    whole = made.loss.item() if (targets != data.IGNORED).any() else 0.0
    return losses.tolist(), hits.tolist(), whole
