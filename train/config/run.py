"""A whole run: the tables of the file together, and the sizes that follow from them."""

from pathlib import Path
from typing import NamedTuple

from pydantic import model_validator

from .refusal import ConfigError
from .rules import RULES
from .sections import (
    Checkpoint,
    Data,
    Evaluation,
    Kubernetes,
    Launch,
    Lora,
    Memory,
    Metrics,
    Model,
    Optimizer,
    Parallel,
    Section,
    Sequence,
    Slurm,
    Train,
)


class Batch(NamedTuple):
    """Sequences a step, sequences a forward pass of one data replica, forward passes a step."""

    global_batch: int
    micro_batch: int
    accumulation: int


class Config(Section):
    """A whole run. Frozen; made by `load`."""

    model: Model
    data: Data
    sequence: Sequence
    parallel: Parallel
    optimizer: Optimizer
    train: Train
    lora: Lora = Lora()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    metrics: Metrics = Metrics()
    launch: Launch
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @model_validator(mode="after")
    def _rules(self) -> "Config":
        for check in RULES:
            check(self)
        return self

    @property
    def world_size(self) -> int:
        """Processes that [launch] starts."""
        return self.launch.nodes * self.launch.processes_per_node

    @property
    def sequence_parallel(self) -> int:
        """Ranks that share one sequence."""
        return self.parallel.ring * self.parallel.ulysses

    @property
    def run_dir(self) -> Path:
        """Folder for everything that the run writes."""
        return Path(self.metrics.dir) / self.train.name

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_dir / "checkpoints" if self.checkpoint.dir is None else Path(self.checkpoint.dir)

    def data_parallel(self, world: int) -> int:
        """Data replicas in a world of this many processes. ConfigError if the mesh does not fill it."""
        shared, data = self.sequence_parallel, self.parallel.data
        mesh = f"parallel.ring = {self.parallel.ring} * parallel.ulysses = {self.parallel.ulysses}"
        if shared > world:
            raise ConfigError(f"{mesh} = {shared} ranks is more than the {world} processes of the world")
        if data is None and world % shared:
            raise ConfigError(f"a world of {world} processes does not divide by {mesh} = {shared}")
        if data is not None and data * shared != world:
            raise ConfigError(
                f"{mesh} * parallel.data = {data} is {data * shared} ranks, the world has {world} processes"
            )
        return world // shared

    def batch(self, world: int) -> Batch:
        """The three batch sizes in a world of this many processes, missing ones derived. ConfigError if they differ."""
        data = self.data_parallel(world)
        total, micro, steps = self.train.global_batch, self.train.micro_batch, self.train.accumulation
        if micro is None:
            micro = _quotient(total, steps * data) if total and steps else 1
        if steps is None:
            steps = _quotient(total, micro * data) if total else 1
        if total is None:
            total = micro * steps * data
        if total != micro * steps * data:
            raise ConfigError(self._batch_message(world, data))
        if micro > 1 and self.data.document_mask:
            raise ConfigError(
                f"train.micro_batch = {micro} must be 1 while data.document_mask = true: "
                "raise train.accumulation instead"
            )
        return Batch(total, micro, steps)

    def _batch_message(self, world: int, data: int) -> str:
        given = {name: getattr(self.train, name) for name in Batch._fields}
        listed = ", ".join(f"train.{name} = {'left out' if value is None else value}" for name, value in given.items())
        return (
            f"global_batch must be micro_batch * accumulation * data: {listed}, data = {data} "
            f"(world {world} / (ring {self.parallel.ring} * ulysses {self.parallel.ulysses}))"
        )


def _quotient(total: int, divisor: int) -> int:
    """total / divisor rounded up, so that a remainder shows as a product that is too large."""
    return -(-total // divisor)
