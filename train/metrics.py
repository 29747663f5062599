"""What a step is measured by: one record of global numbers, one table of metrics, one writer.

A metric is a function of the record with its unit in its name. The loop makes the record, the same on every rank;
`MetricsWriter` hands the row to the sinks of `sinks.py`, on global rank 0 only.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .config import Config
from .evaluation import Result, draw
from .flops import FORMULA
from .sinks import JsonlSink, ProgressSink, Sink, WandbSink

Number = float | int | None


@dataclass(frozen=True)
class StepRecord:
    """One step in plain numbers, summed over every rank and accumulation step unless said otherwise.

    step: steps done, this one included: the first is 1
    loss_sum: nats, over all valid targets, no factor that serves the gradient
    valid_tokens: targets that count in the loss
    tokens, tokens_seen: tokens of the documents, padding left out: of this step; of the run so far
    padding: tokens of this step that belong to no document
    grad_norm: of the whole gradient, before clipping
    learning_rate: that this step used
    step_time_s, data_wait_s: the slowest rank; the wait is part of the step
    peak_memory_bytes: most that any one device held allocated; None without device memory
    num_gpus: processes of the world
    dense_flops, attention_flops: model FLOPs, see flops.FORMULA
    peak_tflops: dense peak of one device; None if unknown
    stop_signal: that asked any rank to stop, 0 for none
    """

    step: int
    loss_sum: float
    valid_tokens: int
    tokens: int
    padding: int
    tokens_seen: int
    grad_norm: float
    learning_rate: float
    step_time_s: float
    data_wait_s: float
    peak_memory_bytes: int | None
    num_gpus: int
    dense_flops: int
    attention_flops: int
    peak_tflops: float | None
    stop_signal: int = 0


def loss(record: StepRecord) -> Number:
    """Mean over the valid tokens of all ranks, nats; null without any."""
    return record.loss_sum / record.valid_tokens if record.valid_tokens else None


def grad_norm(record: StepRecord) -> Number:
    return record.grad_norm


def learning_rate(record: StepRecord) -> Number:
    return record.learning_rate


def tokens_seen(record: StepRecord) -> Number:
    return record.tokens_seen


def valid_tokens(record: StepRecord) -> Number:
    return record.valid_tokens


def padding_share(record: StepRecord) -> Number:
    """Share of the step's tokens that are padding, 0 to 1."""
    return record.padding / (record.tokens + record.padding)


def tokens_per_s(record: StepRecord) -> Number:
    return record.tokens / record.step_time_s


def tokens_per_s_per_gpu(record: StepRecord) -> Number:
    return record.tokens / record.step_time_s / record.num_gpus


def model_tflops_per_gpu(record: StepRecord) -> Number:
    """Model TFLOP/s of one GPU."""
    return (record.dense_flops + record.attention_flops) / record.step_time_s / record.num_gpus / 1e12


def mfu(record: StepRecord) -> Number:
    """Model FLOP/s as a share of the peak, 0 to 1; null where the peak is unknown."""
    achieved = model_tflops_per_gpu(record)
    return achieved / record.peak_tflops if record.peak_tflops and achieved is not None else None


def attention_share(record: StepRecord) -> Number:
    """Attention's share of the model FLOPs, 0 to 1."""
    total = record.dense_flops + record.attention_flops
    return record.attention_flops / total if total else None


def peak_memory_gib(record: StepRecord) -> Number:
    return record.peak_memory_bytes / 2**30 if record.peak_memory_bytes is not None else None


def data_wait_s(record: StepRecord) -> Number:
    return record.data_wait_s


def step_time_s(record: StepRecord) -> Number:
    return record.step_time_s


METRICS: dict[str, Callable[[StepRecord], Number]] = {
    "loss": loss,
    "grad_norm": grad_norm,
    "learning_rate": learning_rate,
    "tokens_seen": tokens_seen,
    "valid_tokens": valid_tokens,
    "padding_share": padding_share,
    "tokens_per_s": tokens_per_s,
    "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
    "model_tflops_per_gpu": model_tflops_per_gpu,
    "mfu": mfu,
    "attention_share": attention_share,
    "peak_memory_gib": peak_memory_gib,
    "data_wait_s": data_wait_s,
    "step_time_s": step_time_s,
}


class MetricsWriter:
    """Writes each step to every sink; on any rank but global rank 0 it does nothing.

    with MetricsWriter(config, global_rank=rank, mfu_null_reason=reason, facts={"world_size": 4}) as metrics:
        metrics.write(record)

    after: the step behind which the run goes on; rows of an earlier process up to it stay in the file
    facts: what else stands in the first line of the file: plain numbers and strings
    """

    def __init__(
        self, config: Config, *, global_rank: int, mfu_null_reason: str | None, facts: Mapping[str, Any], after: int = 0
    ) -> None:
        self._config = config
        self._writes = global_rank == 0
        self._after = after
        self._header = {
            "kind": "header",
            "flops_formula": FORMULA,
            "mfu_null_reason": mfu_null_reason,
            **facts,
            "config": config.model_dump(mode="json"),
        }
        self._sinks: list[Sink] = []
        self._evaluated: set[int] = set()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._writes:
            config = self._config
            file = JsonlSink(config.run_dir, self._header, after=self._after)
            self._evaluated = file.evaluated
            self._add(file)
            self._add(ProgressSink(config.train.name, config.train.steps))
            if config.metrics.wandb != "disabled":
                self._add(WandbSink(config, self._header, after=self._after))
        return self

    def _add(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self._open.push(lambda kind, error, trace: sink.close(failed=error is not None))

    def write(self, record: StepRecord) -> None:
        """Hand one step to every sink."""
        row = {"step": record.step} | {name: metric(record) for name, metric in METRICS.items()}
        for sink in self._sinks:
            sink.write(row)

    def has_evaluated(self, step: int) -> bool:
        """Whether an earlier process wrote an evaluation behind this step; known where the file is written."""
        return step in self._evaluated

    def write_evaluation(self, result: Result) -> None:
        """Draw an evaluation and hand it to every sink."""
        if not self._sinks:
            return
        file = self._config.run_dir / "evaluation" / f"step-{result.step:08}.png"
        picture: Path | None = file
        try:
            draw(result, file, name=self._config.train.name)
        except Exception as error:  # a library may raise anything, and a picture is no reason to end a run
            print(f"ringflash: {file} is not drawn, the run goes on: {error}", file=sys.stderr)
            picture = None
        for sink in self._sinks:
            sink.write_evaluation(result, picture)

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)
