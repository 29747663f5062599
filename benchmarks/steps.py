"""Which step is asked of train_step.py, what is predicted of it, and measured rows beside that; no torch.

Called by train_step.py and by docs/render.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from train import flops, memory, plan  # noqa: E402
from train.config import Config, Memory  # noqa: E402

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


SETS: dict[str, dict[str, Any]] = {
    "plain": {"checkpoint": "none", "loss_chunk": 2**31 - 1},
    "loss": {"checkpoint": "none"},
    "tiled": {"checkpoint": "none", "mlp_tile": 4096},
    "checkpointed": {"mlp_tile": 4096},
    "offload": {"mlp_tile": 4096, "offload": ["activations"]},
    "every": {"mlp_tile": 4096, "offload": ["attention"], "checkpoint_every": 8},
    "recomputed": {"mlp_tile": 4096, "offload": ["activations"], "checkpoint_every": 4, "checkpoint": "full"},
}
"""Name of a set of switches -> what of [memory] is not as usual, for ever longer sequences."""


USUAL = Memory().model_dump()
"""[memory] as it is without a word."""


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
    keys = "checkpoint", "checkpoint_every", "offload", "mlp_tile", "loss", "loss_chunk"
    memory = {key: getattr(asked, key) for key in keys if getattr(asked, key) != USUAL[key]}
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


def planned(asked: argparse.Namespace) -> plan.Plan:
    """The plan of all ranks of --ring."""
    config = config_of(asked, whole=True)
    table = config.model.config | {"model_type": config.model.architecture, "sliding_window": asked.window}
    return plan.Plan(config, SimpleNamespace(**table), asked.ring, updates=asked.optimizer != "none")


def limits_of(asked: argparse.Namespace, device_bytes: int | None) -> plan.Limits:
    """What the machine has for one process. device_bytes: of its GPU, None on a CPU."""
    host = plan.host_bytes() if asked.host_gb is None else round(asked.host_gb * plan.GB)
    return plan.Limits(device_bytes, host, 1)


def device_bytes_of(asked: argparse.Namespace) -> int | None:
    """Memory of the GPU, as the words say it."""
    return None if asked.device_gb is None else round(asked.device_gb * plan.GB)


def predicted(asked: argparse.Namespace, device_bytes: int | None) -> dict[str, Any]:
    """What `train.memory` and `train.flops` say of the step. Raises: ValueError if it cannot fit, unless forced."""
    run, rates, limits = planned(asked), flops.RATES["H200"], limits_of(asked, device_bytes)
    if not asked.force and (refusal := run.refusal(limits, rates)):
        raise ValueError(refusal)
    found, times = memory.predict(run.sizes, run.step()), run.seconds(run.step(), rates)
    return {
        "predicted_peak_bytes": found.device_bytes, "predicted_peak": found.peak._asdict(),
        "predicted_host_bytes": found.host_bytes, "predicted_seconds": sum(times.values()),
        "predicted_parts_s": {name: round(seconds, 3) for name, seconds in times.items()},
        "predicted_longest": run.longest(run.step(), limits) if device_bytes else None,
    }  # fmt: skip


def parsed(words: list[str], about: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="of the shape, left out: all")
    parser.add_argument("--length", type=int, default=131072, help="tokens")
    parser.add_argument("--window", type=int, help="keys that a query sees, left out: all before it")
    parser.add_argument("--ring", type=int, default=1, metavar="P", help="take one rank's part of a ring of P alone")
    parser.add_argument("--ring-rank", type=int, default=0, metavar="R", help="which one; its blocks are here")
    parser.add_argument("--ring-kernel", default="auto", metavar="NAME", help="of that part's hops")
    parser.add_argument("--link-gb-per-s", type=float, default=450.0, help="10^9 bytes a second that reach a rank")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage, with an optimizer")
    parser.add_argument("--optimizer", choices=("none", "adamw", "sgd"), default="none")
    parser.add_argument("--checkpoint", choices=("none", "full", "selective"), default="selective")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="K")
    parser.add_argument("--offload", action="append", default=[], metavar="WHAT", help="as memory.offload")
    parser.add_argument("--mlp-tile", type=int, metavar="TOKENS")
    parser.add_argument("--loss", choices=("chunked", "liger"), default="chunked", help="as memory.loss")
    parser.add_argument("--loss-chunk", type=int, default=1024, metavar="TOKENS")
    parser.add_argument(
        "--warm", type=int, nargs="?", const=0, metavar="TOKENS", help="a step before, of so many tokens"
    )
    parser.add_argument("--host-gb", type=float, help="memory of this machine, 10^9 bytes, where it does not say all")
    parser.add_argument("--device-gb", type=float, help="memory of the GPU, 10^9 bytes; left out: it is asked")
    parser.add_argument("--switches", choices=SETS, help="of [memory], a set of them by name")
    parser.add_argument("--largest", action="store_true", help="the longest sequence that fits, less and plus 5%%")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of each step of --largest")
    parser.add_argument("--profile", action="store_true", help="add what PyTorch's profiler saw of the step, by kind")
    parser.add_argument("--force", action="store_true", help="try what cannot fit")
    parser.add_argument("--against", type=Path, metavar="FILE", help="only compare the rows of FILE with predictions")
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--dry-run", action="store_true", help="the shape tiny at 64 tokens, whatever else is asked")
    asked = parser.parse_args(words)
    for name, value in SETS.get(asked.switches, {}).items():
        setattr(asked, name, value)
    if asked.largest and asked.device_gb is None:
        parser.error("--largest needs --device-gb: a process that asks the GPU takes memory of it")
    if asked.dry_run:
        asked.shape, asked.layers, asked.length, asked.dtype = "tiny", None, 64, "float32"
    return asked


PEAK = flops.PEAK_TFLOPS["H200"] * 1e12
"""FLOP/s of the card that the rows are of."""

PROCESS_BYTES, DEEPSPEED_BYTES, START_BYTES = 1_950_000_000, 2_450_000_000, 1_430_000_000
"""Of one process in host memory, as the rows without offload have it: with the model alone, with DeepSpeed, and with
that before the first step. `plan.HOST_BASE` leaves room for all.
"""


def first_call(row: dict[str, Any]) -> float:
    """Seconds that the first call of attention took longer than the others: a form of a kernel that was made then."""
    attention = [each for name, each in row.get("calls_s", {}).items() if name.startswith("attention")]
    return sum(each[0] - median(each[1:]) for each in attention if len(each) > 1)


AGAINST = ["shape", "layers", "tokens", "[memory]", "peak, GB", "predicted", "host, GB", "predicted", "seconds",
           "first call", "without it", "predicted"]  # fmt: skip


def against(path: Path) -> list[list[str]]:
    """A table of measured rows beside what is predicted of them now: its lines below `AGAINST`."""
    lines = []
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        asked = parsed(shlex.split(row["command"])[2:])
        asked.force = True
        now = predicted(asked, None)
        settled = row["seconds"] - first_call(row)
        pairs = [
            (row["peak_allocated_bytes"] / 1e9, now["predicted_peak_bytes"] / 1e9),
            (row["host_peak_bytes"] / 1e9, host_of(asked, now["predicted_host_bytes"]) / 1e9),
            (settled, now["predicted_seconds"]),
        ]
        device, host, seconds = ([f"{got:.1f}", f"{said:.1f} ({said / got - 1:+.0%})"] for got, said in pairs)
        measured = [f"{row['seconds']:.1f}", f"{first_call(row):z.1f}"]
        lines.append([shape_of(row), str(row["layers"]), f"{row['length']:,}", switches(row["memory"]),
                      *device, *host, *measured, *seconds])  # fmt: skip
    return lines


def host_of(asked: argparse.Namespace, said: int) -> float:
    """Bytes of a process that offloads so many."""
    base = PROCESS_BYTES if asked.optimizer == "none" else DEEPSPEED_BYTES
    run = planned(asked)
    if memory.LAID_OUT in memory.host(run.sizes, run.step()):
        return max(base, START_BYTES + said)
    return base + (1 + (asked.warm or 0) / (asked.length // asked.ring)) * said  # the step before keeps its own


def switches(memory: dict[str, Any]) -> str:
    """What of [memory] is not as usual."""
    return ", ".join(f"{key} = {value}" for key, value in memory.items() if value != USUAL[key])


def shape_of(row: dict[str, Any]) -> str:
    """Of what model and how much of it, with which window, and which optimizer."""
    kernel = row.get("ring_kernel", "auto")
    share = "" if row.get("ring", 1) == 1 else f", one of {row['ring']} ranks"
    share += "" if kernel == "auto" else f", {kernel}"
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(row.get("optimizer", "none"))
    optimizer = f", {name}, ZeRO {row['zero']}" if name else ""
    return row["shape"] + share + (f", window {row['window']:,}" if row["window"] else "") + optimizer


def model_flops(run: plan.Plan) -> flops.StepFlops:
    """What the model needs, of one rank."""
    counted, ranks = flops.step_flops(run.shape, [run.step().sequence]), run.step().ranks
    return flops.StepFlops(counted.dense // ranks, counted.attention // ranks)


def attention_flops(run: plan.Plan) -> tuple[float, float]:
    """What attention's kernels do in the forward and in the backward of one rank's step, without recomputation."""
    forward = model_flops(run).attention / 3
    return forward, 2.5 * forward
