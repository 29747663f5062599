"""One training step of one process through the trainer's own model and engine: a JSON line with its time and memory.

python benchmarks/train_step.py --shape llama3-8b --layers 4 --length 1048576 --optimizer none \
    --offload activations --offload attention --warm 16384
python benchmarks/train_step.py --dry-run        # a tiny shape, on a CPU too
python benchmarks/train_step.py --largest --switches offload --window 4096 --device-gb 150.1 --host-gb 137
python benchmarks/train_step.py --against docs/results/train_step.jsonl      # measured beside predicted

Tokens and weights are random. `--optimizer none` is the model alone, whose gradients stay in its own type; otherwise
DeepSpeed is there as in a run. Seconds are those of the last step; attention's are taken with events around the
ring's forward and backward, and told on stderr as they come; so is the loss. `--warm` runs a step before, of so many
tokens, or of as many as the measured one.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BEGAN = time.perf_counter()

import largest  # noqa: E402
import torch  # noqa: E402
from profiling import maybe  # noqa: E402
from ring_share import Share  # noqa: E402
from spans import Spans  # noqa: E402
from steps import AGAINST, SHAPES, against, config_of, device_bytes_of, parsed, predicted  # noqa: E402

import ringflash  # noqa: E402
from train import flops, model, world  # noqa: E402
from train.config import Config, check_packages  # noqa: E402
from train.engine import Engine, cutter  # noqa: E402
from train.loss import check_device  # noqa: E402


class Step:
    """What is stepped: the model under its engine, or alone."""

    def __init__(self, config: Config, joined: world.World, *, updates: bool) -> None:
        self._config, self._world = config, joined
        ringflash.hf.register(joined.ring, name=model.ATTENTION)
        batch = config.batch(1)
        self._model = model.build(config, joined.device, cutter(config, batch) if updates else None)
        self._engine = Engine(self._model, config, batch, joined) if updates else None

    def reserve(self, length: int) -> None:
        """Take host memory for steps of so many tokens."""
        self._coming = self._model.reserve(length, self._world.device)

    def settle(self) -> None:
        """Once all that was begun before is done, host memory is there too."""
        for coming in self._coming:
            coming.result()
        self._world.settle()

    def __call__(self, length: int) -> dict[str, float]:
        """One step on random tokens. Returns its seconds and those of its parts."""
        generator = torch.Generator(self._world.device).manual_seed(1)
        vocabulary = self._config.model.config["vocab_size"]
        ids = torch.randint(vocabulary, (1, length), generator=generator, device=self._world.device)
        labels, layout = ids.roll(-1, 1), self._world.ring.layout(length)
        self._world.settle()
        times = [time.perf_counter()]
        loss = (self._engine or self._model)(ids, labels, layout)
        self._lap(times)
        if self._engine:
            self._engine.backward(loss, valid_targets=length)
        else:
            (loss / length).backward()
        self._lap(times)
        value = loss.item() / length
        del loss
        if self._engine:
            self._engine.step(1e-5)
        else:
            self._model.zero_grad()
        self._lap(times)
        forward, backward, update = (b - a for a, b in itertools.pairwise(times))
        return {
            "seconds": times[-1] - times[0], "forward_s": forward, "backward_s": backward, "update_s": update,
            "loss": value,
        }  # fmt: skip

    def _lap(self, times: list[float]) -> None:
        self._world.settle()
        times.append(time.perf_counter())


def lap(ready: dict[str, float], name: str) -> None:
    """Note what passed since the parts before."""
    ready[name] = round(time.perf_counter() - BEGAN - sum(ready.values()), 2)
    print(f"{name}: {ready[name]} s", file=sys.stderr, flush=True)


def measure(
    asked: argparse.Namespace, config: Config, joined: world.World, share: Share | None
) -> dict[str, Any]:  # fmt: skip
    """The row, without where it comes from."""
    device, ready = joined.device, {"imports_and_world": time.perf_counter() - BEGAN}
    step = Step(config, joined, updates=asked.optimizer != "none")
    step.reserve(config.sequence.length)
    lap(ready, "model")
    shape, length = flops.describe(model.config_of(config.model, asked.length)), config.sequence.length
    spans = Spans(device)
    with share.taken() if share else nullcontext(), spans.watching():
        if asked.warm is not None:
            spans.begin()
            step(asked.warm or length)
        lap(ready, "warm")
        step.settle()
        lap(ready, "host_memory")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        spans.begin()
        with maybe(device, asked.profile) as profile:
            before = share.transport.num_bytes if share else 0
            times = step(length)
    calls = spans.calls()
    spent = {f"{name}_s": round(sum(each), 4) for name, each in calls.items()}
    print(f"step: {times['seconds']:.3f} s, {spent}", file=sys.stderr, flush=True)
    counted = flops.step_flops(shape, [asked.length])
    counted = counted._replace(**{name: size // asked.ring for name, size in counted._asdict().items()})
    peak, _ = flops.peak_tflops(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", asked.dtype, None)
    seconds, total = times["seconds"], sum(counted)
    row = {key: round(value, 4) for key, value in times.items()} | spent
    row |= {
        "tokens_per_s": round(length / seconds, 2),
        "model_tflops": round(total / seconds / 1e12, 2),
        "mfu_causal": round(total / seconds / 1e12 / peak, 4) if peak else None,
        "attention_share_of_flops": round(counted.attention / total, 4),
        "attention_share_of_time": round((spent["attention_forward_s"] + spent["attention_backward_s"]) / seconds, 4),
        "calls_s": calls,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ready_s": ready,
    }
    if share:
        row |= whole_ring(asked, config, row, share.transport.num_bytes - before)
    if profile is not None:
        row["profile"] = profile.summary()
    if device.type == "cuda":
        row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        row["allocation_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
        row["device_bytes"] = torch.cuda.mem_get_info(device)[1]
    return row


def whole_ring(asked: argparse.Namespace, config: Config, row: dict[str, Any], received: int) -> dict[str, Any]:
    """What one rank's step says of a ring whose model has all layers: loss once, the rest by the layer."""
    layers, every = config.model.config["num_hidden_layers"], SHAPES[asked.shape]["num_hidden_layers"]
    loss = row["loss_forward_s"] + row["loss_backward_s"]
    hidden = loss + (row["seconds"] - loss) * every / layers
    bytes_of_all = received * every / layers
    none_hidden = hidden + bytes_of_all / (asked.link_gb_per_s * 1e9)
    return {
        "ring_kernel": asked.ring_kernel, "received_bytes": received, "layers_of_ring": every,
        "link_gb_per_s": asked.link_gb_per_s,
        "ring_seconds_all_hidden": round(hidden, 2), "ring_seconds_none_hidden": round(none_hidden, 2),
    }  # fmt: skip


def where(words: list[str], commit: str | None) -> dict[str, str]:
    """Where the row comes from, on a GPU or not."""
    from provenance import provenance

    if torch.cuda.is_available():
        return provenance("train_step.py", words, commit)
    return {
        "command": " ".join(["python", "benchmarks/train_step.py", *words]), "commit": commit or "none",
        "hardware": "cpu", "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main(words: list[str]) -> int:
    """Print the row of one step. Returns the exit code: 2 for what is refused, in one sentence, 3 if memory ends."""
    asked = parsed(words, __doc__)
    if asked.against is not None:
        for line in [AGAINST, ["---"] * len(AGAINST), *against(asked.against)]:
            print(f"| {' | '.join(line)} |")
        return 0
    try:
        if asked.largest:
            return longest(asked, words)
        run(asked, words)
    except ValueError as refusal:
        print(f"train_step: {refusal}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"train_step: {error}", file=sys.stderr)
        return 3
    return 0


def longest(asked: argparse.Namespace, words: list[str]) -> int:
    """Print what is tried around the longest sequence. Returns 0 if the planner was right, otherwise 1."""
    found: dict[str, Any] = {}
    for found in largest.rows(asked, [word for word in words if word != "--largest"]):
        last = found | (where(words, asked.commit) if "tried" in found else {})
        print(json.dumps(last), flush=True)
    return int(not found["planner_is_right"])


def run(asked: argparse.Namespace, words: list[str]) -> None:
    """What `main` does."""
    config, share = config_of(asked), None
    if asked.loss == "liger" and "loss_chunk" in config.memory.model_fields_set:
        raise ValueError(f"--loss-chunk {asked.loss_chunk} is of --loss chunked: leave it out")
    if asked.ring > 1:
        if asked.optimizer != "none":
            raise ValueError(
                f"--ring {asked.ring} is one rank alone, without --optimizer {asked.optimizer}: leave it out"
            )
        warm = [asked.warm * asked.ring] if asked.warm else []
        share = Share(asked.ring, asked.ring_rank, [asked.length, *warm], asked.window, asked.ring_kernel)
    room = device_bytes_of(asked)
    if room is None and torch.cuda.is_available():
        world.grow_segments()  # before the first allocation
        room = torch.cuda.mem_get_info()[1]
    said = predicted(asked, room)
    place = world.Place.from_environment()
    check_packages(config)
    check_device(config.memory.loss, world.device_of(place))
    with world.start(config, place) as joined:
        row = {key: getattr(asked, key) for key in ("shape", "length", "ring", "window", "dtype", "optimizer")}
        row |= {
            "layers": config.model.config["num_hidden_layers"],
            "zero": asked.zero if asked.optimizer != "none" else None,
        }
        row |= {"memory": config.memory.model_dump()} | said
        row |= measure(asked, config, joined, share) | where(words, asked.commit)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
