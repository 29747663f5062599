"""The random generators of a process: their states for a checkpoint, new ones on another mesh.

Called by `saver` and `resume`.
"""

import random
from typing import Any

import numpy as np
import torch


def states(device: torch.device) -> dict[str, Any]:
    """The states of all random generators of this process, as plain values and tensors."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Put back what `states` returned."""
    random.setstate(saved["python"])
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)


def reseed(seed: int, step: int, rank: int) -> None:
    """New states for a rank that has none behind this step: the same whenever the run goes on from there."""
    first, second = np.random.SeedSequence([seed, step, rank]).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.manual_seed(int(first) << 32 | int(second))
