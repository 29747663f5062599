"""A run from top to bottom: `fit` makes the parts and goes through the steps, `train_step` is one of them.

Called by `__main__`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ringflash

from . import data, flops, loss, model, out_of_memory, plan, probe, stopping
from .claim import Claim, of_run
from .config import Batch, Config
from .data import Sequence, Window, Windows
from .engine import Engine, cutter, learning_rate
from .evaluation import Evaluator
from .metrics import MetricsWriter, StepRecord
from .nonfinite import Guard
from .resume import base_of, choose, holds_all, resume
from .saver import Progress, Saver
from .watch import Watch, end_process
from .world import World

SETTLE_S = 20
"""How long a run that ends by an error waits for the checkpoint that is being written."""


@dataclass(frozen=True)
class Run:
    """What a step needs: made once by `prepare`.

    windows: for each step this ring's micro-batches
    saver, progress: the checkpoints, and where the run goes on from
    evaluator: None unless [evaluation] asks for it during training
    request, guard, watch: a signal to stop, steps that are not finite, hangs and ranks that are gone
    claim: rank 0's on the folders of the run
    shape: for counting FLOPs; peak_tflops: of one device, or None and the reason
    """

    config: Config
    world: World
    batch: Batch
    engine: Engine
    windows: Windows
    saver: Saver
    progress: Progress
    evaluator: Evaluator | None
    request: stopping.Request
    guard: Guard
    watch: Watch
    claim: Claim | None
    shape: flops.ModelShape
    peak_tflops: float | None
    peak_missing: str | None


def prepare(config: Config, world: World, *, fail: Callable[[str], None] = end_process) -> Run:
    """Data, model and engine of a run, tested. Raises: ValueError for what cannot be trained, before any step.

    fail: see `Watch`
    """
    loss.check_device(config.memory.loss, world.device)
    claim = of_run(config, world)
    batch = config.batch(world.size)
    tokenizer = data.tokenizer_of(config.data, config.model.config["vocab_size"])
    length = config.sequence.length
    sequences = data.sequences(config.data, tokenizer, length=length, seed=config.train.seed)
    evaluator = None
    if config.evaluation.every is not None:
        data.check_apart(config.data, config.evaluation)
        evaluator = Evaluator(config, world, tokenizer)
    hf = model.config_of(config.model, length)
    shape = flops.describe(hf)
    check_memory(config, world, hf)
    base = base_of(config, world)
    chosen = choose(config, world, base=base)
    engine = build_engine(config, world, filled=not holds_all(chosen, config))
    if config.train.trainable == "lora":
        shape = shape.with_adapters(model.num_trained(engine.module))
    engine.module.reserve(batch.micro_batch * length // config.sequence_parallel, world.device)
    windows = data.Windows(sequences, batch, data_rank=world.data_rank, data_size=world.data_size)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    peak, missing = flops.peak_tflops(name, config.model.dtype, config.metrics.peak_tflops)
    guard = Guard(config, world, sequences.names)
    saver = Saver(config, world, engine, windows, guard, base=base, found=chosen)
    progress = resume(chosen, config, world, engine, windows, guard)
    request = stopping.Request(heeded=config.checkpoint.every is not None)
    return Run(
        config, world, batch, engine, windows, saver, progress, evaluator, request, guard,
        Watch(config, world, fail), claim, shape, peak, missing,
    )  # fmt: skip


def check_memory(config: Config, world: World, hf: Any) -> None:
    """Refuse what cannot fit into this GPU and this machine. Raises: ValueError on all ranks, see `plan.check`."""
    on_gpu = world.device.type == "cuda"
    plan.check(config, hf, world.size, torch.cuda.mem_get_info(world.device)[1] if on_gpu else None)


def build_engine(config: Config, world: World, *, filled: bool = True) -> Engine:
    """The model of a run under its engine, tested, with the weights that it begins with. Raises: as `prepare`.

    filled: see `model.build`
    """
    batch = config.batch(world.size)
    ringflash.hf.register(world.ring, name=model.ATTENTION)
    world.layout(config.sequence.length)
    if config.train.self_test:
        probe.check_attention(config, world)
        probe.check_gradient(config, world)
    return Engine(model.build(config, world.device, cutter(config, batch), filled=filled), config, batch, world)


def fit(run: Run) -> str | None:
    """Train up to train.steps, write the metrics of each step, save and evaluate where they are due.

    Returns None; or, where a signal stopped it before its end, what is saved. Raises: NonFiniteError, OutOfMemoryError,
    CheckpointError.
    """
    facts = {"world_size": run.world.size, "device": str(run.world.device), "torch": torch.__version__}
    (first, tokens_seen), last = run.progress, run.config.train.steps
    writer = MetricsWriter(
        run.config, global_rank=run.world.rank, mfu_null_reason=run.peak_missing, facts=facts, after=first
    )
    with run.request, run.watch, writer as metrics:
        try:
            if stopped := catch_up(run, metrics):
                return stopped
            for step in range(first + 1, last + 1):
                if step <= first + 2:
                    run.saver.reserve()
                with out_of_memory.explained(run.config, run.watch):
                    record = train_step(run, step, tokens_seen=tokens_seen)
                tokens_seen = record.tokens_seen
                metrics.write(record)
                run.watch.took(record.step_time_s)
                run.watch.begin(step, "save")
                done = Progress(step, tokens_seen)
                if record.stop_signal and step < last:
                    return stopping.sentence(record.stop_signal, step, run.saver.save(done))
                if run.saver.due(step):
                    run.saver.start(done)
                if (
                    run.evaluator
                    and run.evaluator.due(step)
                    and (stopped := evaluate(run, run.evaluator, done, metrics))
                ):
                    return stopped
            run.watch.begin(last, "end")
            run.saver.wait()
        finally:
            run.saver.settle(SETTLE_S)
            if run.claim is not None:
                run.claim.release()
    return None


def catch_up(run: Run, metrics: MetricsWriter) -> str | None:
    """Make the evaluation that was due where the run goes on, if an end came before it. Returns: as `evaluate`."""
    if run.evaluator is None or run.progress.step == 0 or not run.evaluator.due(run.progress.step):
        return None
    if run.world.gather([float(metrics.has_evaluated(run.progress.step))])[0, 0]:
        return None
    return evaluate(run, run.evaluator, run.progress, metrics)


def evaluate(run: Run, evaluator: Evaluator, done: Progress, metrics: MetricsWriter) -> str | None:
    """What [evaluation] asks for, between two steps. All ranks must call it.

    A signal is heeded before the next forward pass: then the evaluation is left, and made when the run goes on. Returns
    what is saved then, None without one.
    """

    def begin() -> int:
        run.watch.begin(done.step, "evaluation")
        return run.request.signal

    try:
        metrics.write_evaluation(evaluator(run.engine, done, begin=begin))
        # the next step is not timed while rank 0 still draws
        signal = int(run.world.gather([float(begin())]).max())
        if done.step == run.config.train.steps:
            return None
    except stopping.StopError as stop:
        signal = stop.signal
    if not signal:
        return None
    run.watch.begin(done.step, "save")
    return stopping.sentence(signal, done.step, run.saver.save(done))


def train_step(run: Run, step: int, *, tokens_seen: int) -> StepRecord:
    """One optimizer step on the next window. All ranks must call it, and all get the same record.

    step: counted from 1; tokens_seen: before it
    """
    world, start = run.world, time.perf_counter()
    run.watch.begin(step, "data")
    window = next(run.windows)
    waited = time.perf_counter() - start
    counts = count(run, window)
    losses = forward_backward(run, step, window, counts.valid_targets)
    run.watch.begin(step, "update")
    rate = learning_rate(step, run.config.optimizer, steps=run.config.train.steps)
    grad_norm = run.engine.step(rate, skip=not np.isfinite(losses).all())
    run.guard.check(step, window, losses, grad_norm)
    world.settle()
    signal, unsaved = float(run.request.signal), float(run.saver.failed)
    ended = world.gather([signal, time.perf_counter() - start, waited, peak_memory(world.device), unsaved])
    if ended[:, 4].any():
        run.saver.wait()  # which raises on all ranks
    return StepRecord(
        step=step,
        loss_sum=float(losses.sum()),
        valid_tokens=counts.valid_targets,
        tokens=counts.tokens,
        padding=run.batch.global_batch * run.config.sequence.length - counts.tokens,
        tokens_seen=tokens_seen + counts.tokens,
        grad_norm=grad_norm,
        learning_rate=rate,
        step_time_s=float(ended[:, 1].max()),
        data_wait_s=float(ended[:, 2].max()),
        peak_memory_bytes=int(ended[:, 3].max()) or None,
        num_gpus=world.size,
        dense_flops=counts.flops.dense,
        attention_flops=counts.flops.attention,
        peak_tflops=run.peak_tflops,
        stop_signal=int(ended[:, 0].max()),
    )


def forward_backward(run: Run, step: int, window: Window, valid_targets: int) -> np.ndarray:
    """The gradient of a window. Returns the loss sums of all ranks, float64 [ranks, micro-batches].

    valid_targets: of all ranks
    """
    sums = []
    for micro in window:
        ids, labels, layout = place(run, micro)
        run.watch.begin(step, "forward")
        local_sum = run.engine(layout.shard(ids), layout.shard(labels), layout)
        run.watch.begin(step, "backward")
        run.engine.backward(local_sum, valid_targets=valid_targets)
        sums.append(local_sum.detach())
    return run.world.gather(torch.stack(sums).tolist())


@dataclass(frozen=True)
class Counts:
    """Of one window, over all rings: targets in the loss, tokens of the documents, model FLOPs."""

    valid_targets: int
    tokens: int
    flops: flops.StepFlops


def count(run: Run, window: Window) -> Counts:
    """Add up the windows of all rings, each once. Raises: ValueError if ranks of one ring hold different windows."""
    sequences = [sequence for micro in window for sequence in micro]
    lengths = [length for sequence in sequences for length in attended(run.config, sequence)]
    mine = flops.step_flops(run.shape, lengths)
    valid = sum(sequence.valid_targets for sequence in sequences)
    tokens = sum(sequence.cu_seqlens[-1] for sequence in sequences)
    rows = run.world.gather([data.window_digest(window), valid, tokens, mine.dense, mine.attention])
    data.check_digests(rows[:, 0], run.config.sequence_parallel)
    valid, tokens, dense, attention = (int(total) for total in rows[:: run.config.sequence_parallel, 1:].sum(0))
    return Counts(valid, tokens, flops.StepFlops(dense, attention))


def attended(config: Config, sequence: Sequence) -> list[int]:
    """Lengths of what attention sees as documents."""
    return sequence.lengths if config.data.document_mask else [sequence.cu_seqlens[-1]]


def place(run: Run, micro: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, ringflash.Layout]:
    """A micro-batch on this rank's device, whole, and the layout that cuts it: ids, labels int64 [B, S]."""
    ids, labels = (
        torch.from_numpy(np.stack([getattr(sequence, name) for sequence in micro])).to(run.world.device)
        for name in ("ids", "labels")
    )
    borders = micro[0].cu_seqlens if run.config.data.document_mask else None
    return ids, labels, run.world.layout(run.config.sequence.length, borders)


def peak_memory(device: torch.device) -> float:
    """Most bytes that this rank's GPU held so far; 0 on a CPU."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
