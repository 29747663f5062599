"""Which meshes `mesh_step.py` trains on, and what is predicted of them; no torch. Called by it and by render.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from steps import SHAPES  # noqa: E402

from train import flops, memory, plan  # noqa: E402
from train.config import Config  # noqa: E402


class Case(NamedTuple):
    """A mesh and what it trains. ulysses: ranks that share heads, the others are a ring; window: keys a query sees

    zero: the stage; offload: as memory.offload
    """

    length: int
    layers: int
    layout: str = "zigzag"
    arrangement: str = "ring"
    ulysses: int = 1
    documents: bool = False
    window: int | None = None
    steps: int = 2
    zero: int = 2
    offload: tuple[str, ...] = ()

    def small(self) -> Case:
        """The same mesh on few tokens."""
        return self._replace(length=512, window=self.window and 64)

    def config(self, ranks: int, *, tiny: bool) -> Config:
        """The run of it. ValueError for a number of ranks that it cannot have."""
        if ranks % self.ulysses or (self.length // 2) % ranks:
            raise ValueError(
                f"{ranks} processes: {self.length} tokens and ulysses={self.ulysses} need a power of 2 of them, "
                f"{self.ulysses} or more"
            )
        table = dict(SHAPES["tiny" if tiny else "llama3-8b"]) | {"num_hidden_layers": self.layers}
        architecture = table.pop("architecture")
        if self.window is not None:
            architecture = "mistral"  # the same layers, with a window
            table["sliding_window"] = self.window
        return Config.model_validate(
            {
                "model": {"architecture": architecture, "dtype": "float32" if tiny else "bfloat16", "config": table},
                "data": {"path": "stdlib", "document_mask": self.documents},
                "sequence": {"length": self.length, "layout": self.layout},
                "parallel": {"ring": ranks // self.ulysses, "ulysses": self.ulysses, "zero": self.zero,
                             "arrangement": self.arrangement},
                "optimizer": {"name": "adamw", "lr": 1e-5},
                "train": {"name": "mesh", "steps": self.steps, "global_batch": 1, "self_test": False},
                "memory": {"mlp_tile": 128 if tiny else 16384, "offload": list(self.offload)},
                "metrics": {"wandb": "disabled"},
                "launch": {"processes_per_node": ranks},
            }
        )  # fmt: skip


CASES = {
    "ring-128k": Case(131072, 2, steps=3),
    "ulysses-128k": Case(131072, 2, layout="contiguous", ulysses=2, steps=3),
    "zero3-128k": Case(131072, 2, steps=3, zero=3),
    "optimizer-away-128k": Case(131072, 2, steps=3, offload=("optimizer",)),
    "ring-512k": Case(524288, 2),
    "ulysses-512k": Case(524288, 2, layout="contiguous", ulysses=2),
    "window-512k": Case(524288, 2, window=4096, steps=3),
    "window-contiguous-512k": Case(524288, 2, layout="contiguous", window=4096, steps=3),
    "documents-zigzag": Case(524288, 2, documents=True, steps=4),
    "documents-balanced": Case(524288, 2, layout="balanced", documents=True, steps=4),
    "documents-gather": Case(524288, 2, layout="balanced", arrangement="gather", documents=True, steps=4),
    "ring-1m": Case(1048576, 1),
}
"""Name -> case. A ring and Ulysses together need four GPUs."""


def predicted(config: Config, ranks: int, attention: float | None = None) -> dict[str, float]:
    """Peak bytes of a GPU and seconds of a step.

    attention: its share of the model's FLOPs, as the trainer counts it for the documents of the step; left out: the
        sequence is one document
    """
    table = config.model.config | {"model_type": config.model.architecture}
    run = plan.Plan(config, SimpleNamespace(**{"sliding_window": None} | table), ranks)
    step = run.step()
    document = None
    if attention is not None:  # documents of one length have as many pairs
        dense, whole = flops.step_flops(run.shape, [step.sequence])
        document = round(step.sequence * dense * attention / (1 - attention) / whole)
    seconds = sum(run.seconds(step, flops.RATES["H200"], document).values())
    return {
        "predicted_peak_bytes": memory.predict(run.sizes, replace(step, document=document)).device_bytes,
        "predicted_seconds": round(seconds, 3),
    }
