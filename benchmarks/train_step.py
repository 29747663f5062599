"""One training step of one process through the trainer's own model and engine: a JSON line with its time and memory.

python benchmarks/train_step.py --shape llama3-8b --layers 4 --length 1048576 --optimizer none \
    --offload activations --offload attention --warm 16384
python benchmarks/train_step.py --dry-run        # a tiny shape, on a CPU too
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
import os
import resource
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BEGAN = time.perf_counter()

import torch  # noqa: E402
from profiling import maybe  # noqa: E402
from ring_share import Share  # noqa: E402
from spans import Spans  # noqa: E402

import ringflash  # noqa: E402
from train import flops, memory, model, plan, world  # noqa: E402
from train.config import Config, Memory  # noqa: E402
from train.engine import Engine, cutter  # noqa: E402

LLAMA = {"architecture": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "architecture": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama3-1b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "tiny": LLAMA | {
        "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(asked: argparse.Namespace, *, whole: bool = False) -> Config:
    """The configuration of a run that these words ask for. Raises: ConfigError.

    whole: of all ranks of --ring, where otherwise it is that of one rank's tokens alone
    """
    table = dict(SHAPES[asked.shape])
    architecture = table.pop("architecture")
    if asked.layers is not None:
        table["num_hidden_layers"] = asked.layers
    if asked.window is not None:
        table["sliding_window"] = asked.window
        if architecture == "llama":
            architecture = "mistral"  # the same layers, with a window
        else:
            table |= {"use_sliding_window": True, "max_window_layers": 0}
    memory = {
        "checkpoint": asked.checkpoint, "checkpoint_every": asked.checkpoint_every, "offload": asked.offload,
        "mlp_tile": asked.mlp_tile, "loss_chunk": asked.loss_chunk,
    }  # fmt: skip
    return Config.model_validate(
        {
            "model": {"architecture": architecture, "dtype": asked.dtype, "config": table},
            "data": {"path": "stdlib"},
            "sequence": {
                "length": asked.length if whole else asked.length // asked.ring,
                "layout": "zigzag" if whole else "contiguous",
            },
            "parallel": {"ring": asked.ring if whole else 1, "zero": asked.zero},
            "optimizer": {"name": "adamw" if asked.optimizer == "none" else asked.optimizer, "lr": 1e-5},
            "train": {"name": "step", "steps": 1, "self_test": False},
            "memory": memory,
            "metrics": {"wandb": "disabled"},
            "launch": {"processes_per_node": asked.ring if whole else 1},
        }
    )


def predicted(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What `train.memory` and `train.flops` say of the step. Raises: ValueError if it cannot fit, unless forced."""
    config = config_of(asked, whole=True)
    hf = model.config_of(config.model, asked.length)
    planned = plan.Plan(config, hf, asked.ring, updates=asked.optimizer != "none")
    rates = flops.RATES["H200"]
    room = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    host = plan.host_bytes() if asked.host_gb is None else round(asked.host_gb * plan.GB)
    limits = plan.Limits(room, host, 1)
    if not asked.force and (refusal := planned.refusal(limits, rates)):
        raise ValueError(refusal)
    found, times = memory.predict(planned.sizes, planned.step()), planned.seconds(planned.step(), rates)
    return {
        "predicted_peak_bytes": found.device_bytes, "predicted_peak": found.peak._asdict(),
        "predicted_host_bytes": found.host_bytes, "predicted_seconds": sum(times.values()),
        "predicted_parts_s": {name: round(seconds, 3) for name, seconds in times.items()},
        "predicted_longest": planned.longest(planned.step(), limits) if room else None,
    }  # fmt: skip


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
    spent = spans.seconds()
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
        "received_bytes": received, "layers_of_ring": every, "link_gb_per_s": asked.link_gb_per_s,
        "ring_seconds_all_hidden": round(hidden, 2), "ring_seconds_none_hidden": round(none_hidden, 2),
    }  # fmt: skip


def against(path: Path) -> list[str]:
    """A table of measured rows beside what is predicted of them now."""
    lines = [
        "| shape | layers | tokens | [memory] | peak, GB | predicted | host, GB | predicted | seconds | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        asked = parsed(shlex.split(row["command"])[2:])
        asked.force = True
        now = predicted(asked, torch.device("cpu"))
        usual = Memory().model_dump()
        switches = ", ".join(f"{key} = {value}" for key, value in row["memory"].items() if value != usual[key])
        pairs = [
            (row["peak_allocated_bytes"] / 1e9, now["predicted_peak_bytes"] / 1e9),
            (row["host_peak_bytes"] / 1e9, (now["predicted_host_bytes"] + plan.HOST_BASE) / 1e9),
            (row["seconds"], now["predicted_seconds"]),
        ]
        numbers = " | ".join(f"{got:.1f} | {said:.1f} ({said / got - 1:+.0%})" for got, said in pairs)
        lines.append(f"| {row['shape']} | {row['layers']} | {row['length']:,} | {switches} | {numbers} |")
    return lines


def where(words: list[str], commit: str | None) -> dict[str, str]:
    """Where the row comes from, on a GPU or not."""
    from provenance import provenance

    if torch.cuda.is_available():
        return provenance("train_step.py", words, commit)
    return {
        "command": " ".join(["python", "benchmarks/train_step.py", *words]), "commit": commit or "none",
        "hardware": "cpu", "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="of the shape, left out: all")
    parser.add_argument("--length", type=int, default=131072, help="tokens")
    parser.add_argument("--window", type=int, help="keys that a query sees, left out: all before it")
    parser.add_argument("--ring", type=int, default=1, metavar="P", help="take one rank's part of a ring of P alone")
    parser.add_argument("--ring-rank", type=int, default=0, metavar="R", help="which one; its blocks are here")
    parser.add_argument("--link-gb-per-s", type=float, default=450.0, help="10^9 bytes a second that reach a rank")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage, with an optimizer")
    parser.add_argument("--optimizer", choices=("none", "adamw", "sgd"), default="none")
    parser.add_argument("--checkpoint", choices=("none", "full", "selective"), default="selective")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="K")
    parser.add_argument("--offload", action="append", default=[], metavar="WHAT", help="as memory.offload")
    parser.add_argument("--mlp-tile", type=int, metavar="TOKENS")
    parser.add_argument("--loss-chunk", type=int, default=1024, metavar="TOKENS")
    parser.add_argument(
        "--warm", type=int, nargs="?", const=0, metavar="TOKENS", help="a step before, of so many tokens"
    )
    parser.add_argument("--host-gb", type=float, help="memory of this machine, 10^9 bytes, where it does not say all")
    parser.add_argument("--profile", action="store_true", help="add what PyTorch's profiler saw of the step, by kind")
    parser.add_argument("--force", action="store_true", help="try what cannot fit")
    parser.add_argument("--against", type=Path, metavar="FILE", help="only compare the rows of FILE with predictions")
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--dry-run", action="store_true", help="the shape tiny at 64 tokens, whatever else is asked")
    asked = parser.parse_args(words)
    if asked.dry_run:
        asked.shape, asked.layers, asked.length, asked.dtype = "tiny", None, 64, "float32"
    return asked


def main(words: list[str]) -> int:
    """Print the row of one step. Returns the exit code: 2 for what is refused, in one sentence, 3 if memory ends."""
    asked = parsed(words)
    if asked.against is not None:
        print("\n".join(against(asked.against)))
        return 0
    try:
        run(asked, words)
    except ValueError as refusal:
        print(f"train_step: {refusal}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"train_step: {error}", file=sys.stderr)
        return 3
    return 0


def run(asked: argparse.Namespace, words: list[str]) -> None:
    """What `main` does."""
    config, share = config_of(asked), None
    if asked.ring > 1:
        if asked.optimizer != "none":
            raise ValueError(
                f"--ring {asked.ring} is one rank alone, without --optimizer {asked.optimizer}: leave it out"
            )
        share = Share(asked.ring, asked.ring_rank, asked.length, asked.window)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read at the first allocation
    with world.start(config, world.Place.from_environment()) as joined:
        row = {key: getattr(asked, key) for key in ("shape", "length", "ring", "window", "dtype", "optimizer")}
        row |= {
            "layers": config.model.config["num_hidden_layers"],
            "zero": asked.zero if asked.optimizer != "none" else None,
        }
        row |= {"memory": config.memory.model_dump()} | predicted(asked, joined.device)
        row |= measure(asked, config, joined, share) | where(words, asked.commit)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
