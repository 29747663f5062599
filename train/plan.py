"""Does a run fit, and if not, what would: `python -m train.plan CONFIG`, and the refusal before anything is allocated.

`memory` and `flops` hold the arithmetic; here are a run's configuration, a machine's limits, and words. Also
`ringflash plan`.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import flops, memory
from .config import Config, ConfigError, load, resolve

GB = 10**9
DEVICE_BASE = 2 * GB
"""Of a GPU, what torch does not count: CUDA, its libraries and kernels, pieces too small to be used again."""

HOST_BASE = 3 * GB
"""Of a process in host memory, beside what it offloads; without data 1.9 GB were measured, 2.5 GB with DeepSpeed."""

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}

TILE, CHUNK = 4096, 1024
"""What is offered for memory.mlp_tile and memory.loss_chunk."""

GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Limits(NamedTuple):
    """What a machine has. device_bytes: of one GPU, None on a CPU; host_bytes: shared by its `processes`."""

    device_bytes: int | None
    host_bytes: int
    processes: int

    def fits(self, found: memory.Prediction) -> bool:
        return not self.lacks(found)

    def lacks(self, found: memory.Prediction) -> str:
        """Which memory is too small: "GPU", "host" or "" for none."""
        if self.device_bytes is not None and found.device_bytes + DEVICE_BASE > self.device_bytes:
            return "GPU"
        # a run on a CPU may be of any size
        asked = self.device_bytes is not None or set(found.host) - {memory.LAID_OUT}
        if asked and (found.host_bytes + HOST_BASE) * self.processes > self.host_bytes:
            return "host"
        return ""


def host_bytes(given_gb: float | None = None) -> int:
    """Host memory that processes here may take together: `memory.host_gb`, or the machine's, or less where a control
    group says so."""
    if given_gb is not None:
        return round(given_gb * GB)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = GROUP_LIMIT.read_text().strip() if GROUP_LIMIT.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))


class Plan:
    """A run's memory and time, and those of runs near it.

    hf: its transformers config; updates: False for the model alone, without DeepSpeed and optimizer
    """

    def __init__(self, config: Config, hf: Any, world_size: int, *, updates: bool = True) -> None:
        self.config, self._world_size, self._updates = config, world_size, updates
        self.sizes, self.shape = memory.sizes_of(hf), flops.describe(hf)

    def step(self, switches: Any = None) -> memory.Step:
        """What its memory depends on. switches: another [memory]."""
        config, length = self.config, self.config.sequence.length
        return memory.Step(
            tokens=length // config.sequence_parallel * config.batch(self._world_size).micro_batch,
            sequence=length,
            number_bytes=NUMBER_BYTES[config.model.dtype],
            memory=switches or config.memory,
            ring=config.parallel.ring,
            arrangement=self._arrangement(),
            inner=self._inner(),
            transit_bytes=NUMBER_BYTES[config.parallel.transit],
            ulysses=config.parallel.ulysses,
            ranks=self._world_size,
            zero=config.parallel.zero if self._updates else None,
            states=2 if config.optimizer.name == "adamw" else int(config.optimizer.momentum > 0),
            trained=self._adapters(),
            accumulation=config.batch(self._world_size).accumulation,
        )

    def _inner(self) -> int:
        """Ring ranks of a node, as parallel.topology says; all of them where it says nothing."""
        parallel, shared = self.config.parallel, self.config.sequence_parallel
        told = self.config.launch.processes_per_node if parallel.topology == "hosts" else parallel.topology
        return min(told or shared, shared) // parallel.ulysses

    def _arrangement(self) -> str:
        """What `Ring` makes of parallel.arrangement and parallel.topology."""
        parallel = self.config.parallel
        return parallel.arrangement or ("double" if 1 < self._inner() < parallel.ring else "ring")

    def _adapters(self) -> int | None:
        """Numbers of [lora], about: rank x (in + out) of each layer that gets one, taken as of the model's width."""
        if self.config.train.trainable != "lora":
            return None
        rank, sizes = self.config.lora.rank, self.sizes
        return sizes.layers * len(self.config.lora.targets) * rank * (sizes.width + sizes.mlp_width)

    def seconds(self, step: memory.Step, rates: flops.Rates, document: int | None = None) -> dict[str, float]:
        """Predicted seconds of a step by part. document: tokens of each, left out: as many as the sequence has"""
        document = document or step.sequence
        sizes, switches = self.sizes, step.memory
        runs = flops.passes(switches.checkpoint, switches.checkpoint_every, tiled=switches.mlp_tile is not None)
        batch = self.config.batch(self._world_size)
        moved = sum(size for part, size in memory.host(sizes, step).items() if part != "optimizer")
        every_token = flops.elementwise(sizes, runs, tile=switches.mlp_tile, number_bytes=step.number_bytes)
        chunk = None if switches.loss == "liger" else switches.loss_chunk
        every_token += flops.head_elementwise(sizes, chunk, number_bytes=step.number_bytes)
        times = flops.step_seconds(
            self.shape, _cut(step.sequence * batch.global_batch, document), rates, runs,
            mlp_params=3 * sizes.layers * sizes.width * sizes.mlp_width, head_params=sizes.head_params,
            loss=switches.loss, ranks=step.ranks, moved_bytes=batch.accumulation * moved,
            elementwise_bytes=every_token,
        )  # fmt: skip
        if "optimizer" in switches.offload:
            linked, touched = flops.update_bytes(step, clips=self.config.optimizer.clip_norm > 0)
            numbers = memory.trained_params(sizes, step) / step.ranks
            times["update in host memory"] = numbers * (linked / rates.host + touched / rates.host_memory) / 1e9
        return times

    def longest(self, step: memory.Step, limits: Limits) -> int:
        """The longest sequence that fits."""
        shared = self.config.sequence_parallel
        return memory.longest(self.sizes, step, limits.fits, multiple=128 * 2 * shared)

    def knobs(self, switches: Any) -> Iterator[Any]:
        """[memory] with one key changed so that less is needed."""
        if switches.checkpoint == "none":
            yield switches.model_copy(update={"checkpoint": "selective"})
        if switches.loss == "liger":
            yield switches.model_copy(update={"loss": "chunked"})
        elif switches.loss_chunk > CHUNK:
            yield switches.model_copy(update={"loss_chunk": CHUNK})
        if switches.mlp_tile is None or switches.mlp_tile > TILE:
            yield switches.model_copy(update={"mlp_tile": TILE})
        for kind, needs in (("activations", ("full", "selective")), ("attention", ("selective",))):
            if kind not in switches.offload and switches.checkpoint in needs:
                yield switches.model_copy(update={"offload": [*switches.offload, kind]})
        if "optimizer" not in switches.offload and self._updates and self.config.parallel.zero:
            yield switches.model_copy(update={"offload": [*switches.offload, "optimizer"]})
        every = 2 * switches.checkpoint_every
        if switches.checkpoint != "none" and every <= self.sizes.layers:
            yield switches.model_copy(update={"checkpoint_every": every})
        if switches.checkpoint == "selective":
            offload = [kind for kind in switches.offload if kind != "attention"]
            yield switches.model_copy(update={"checkpoint": "full", "offload": offload})

    def around(self) -> Iterator[tuple[list[str], memory.Step]]:
        """All that knobs can be turned to: (what to write, the step with it), few changes before many."""
        waiting, seen = [self.config.memory], {self.config.memory.model_dump_json()}
        for switches in waiting:
            yield changes(self.config.memory, switches), self.step(switches)
            for other in self.knobs(switches):
                if (key := other.model_dump_json()) not in seen:
                    seen.add(key)
                    waiting.append(other)

    def way_out(self, limits: Limits, rates: flops.Rates) -> str:
        """The knobs that make it fit at the least cost, and what a step would cost more."""
        before = sum(self.seconds(self.step(), rates).values())
        possible = [
            (sum(self.seconds(step, rates).values()) / before - 1, len(turned), turned)
            for turned, step in self.around()
            if limits.fits(memory.predict(self.sizes, step))
        ]
        if possible:
            price, _, turned = min(possible, key=lambda one: (round(one[0], 2), one[1]))
            return f"with {' and '.join(turned)} it fits, and a step takes about {max(price, 0):.0%} longer"
        best = max(self.longest(step, limits) for _, step in self.around())
        if not best:
            return "nor does any with all that [memory] offers: more ranks are needed, or another parallel.zero"
        return f"with all that [memory] offers it would be {best}: more ranks (parallel.ring) are needed"

    def refusal(self, limits: Limits, rates: flops.Rates) -> str:
        """Why the run does not fit, which length would, what to change; "" if it fits."""
        step = self.step()
        found = memory.predict(self.sizes, step)
        lack = limits.lacks(found)
        if not lack:
            return ""
        if lack == "GPU":
            name, size = max(found.peak.parts.items(), key=lambda part: part[1])
            asked = f"the {found.peak.name} takes {_gb(found.device_bytes + DEVICE_BASE)} on each GPU"
            have = f", which has {_gb(limits.device_bytes or 0)}"
        else:
            base = {"what a process takes before it trains": HOST_BASE}
            name, size = max((found.host | base).items(), key=lambda part: part[1])
            asked = f"{limits.processes} processes take {_gb((found.host_bytes + HOST_BASE) * limits.processes)}"
            have = f" of host memory, the machine has {_gb(limits.host_bytes)}"
        longest = self.longest(step, limits)
        fits = f"The longest that fits is {longest}" if longest else "No length fits as it is"
        return (
            f"sequence.length = {step.sequence} does not fit: {asked}{have}; most of it is {name}, {_gb(size)}. "
            f"{fits}; {self.way_out(limits, rates)}"
        )


def changes(before: Any, after: Any) -> list[str]:
    """What to write to get from one [memory] to another."""
    texts = []
    for key, value in after.model_dump().items():
        if value == getattr(before, key):
            continue
        if key != "offload":
            texts.append(f"memory.{key} = {value!r}")
            continue
        texts += [f"{kind!r} in memory.offload" for kind in value if kind not in before.offload]
        texts += [f"no {kind!r} in memory.offload" for kind in before.offload if kind not in value]
    return texts


def _gigabytes(text: str) -> float:
    """A positive number of gigabytes, from the command line; 10^18 bytes at most."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} must be a positive number of gigabytes, at most 1e9")
    return number


def _gb(size: float) -> str:
    """Bytes in a unit that leaves a digit before the point."""
    unit, name = next(((10**n, name) for n, name in ((9, "GB"), (6, "MB")) if size >= 10**n), (10**3, "kB"))
    return f"{size / unit:.1f} {name}"


def _duration(seconds: float) -> str:
    """The same of seconds."""
    unit, name = next(((u, name) for u, name in ((1, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "us"))
    return f"{seconds / unit:.1f} {name}"


def check(config: Config, hf: Any, world_size: int, device_bytes: int | None) -> None:
    """Refuse a run that cannot fit, before anything is allocated. device_bytes: of the GPU, None on a CPU.

    Raises: ValueError.
    """
    if config.memory.device_gb is not None:
        device_bytes = round(config.memory.device_gb * GB)
    limits = Limits(device_bytes, host_bytes(config.memory.host_gb), min(config.launch.processes_per_node, world_size))
    if refusal := Plan(config, hf, world_size).refusal(limits, flops.RATES["H200"]):
        raise ValueError(refusal)


def table(plan: Plan, limits: Limits, rates: flops.Rates) -> list[str]:
    """Memory and time of a step, by part."""
    step = plan.step()
    found = memory.predict(plan.sizes, step)
    lines = [f"device memory  {_gb(found.device_bytes)} of one GPU at its peak, the {found.peak.name}"]
    lines += [f"  {name:<32} {_gb(size):>10}" for name, size in found.peak.parts.items() if size]
    lines += [f"host memory    {_gb(found.host_bytes)} of each of {limits.processes} processes"]
    lines += [f"  {name:<32} {_gb(size):>10}" for name, size in found.host.items()]
    times = plan.seconds(step, rates)
    lines += [f"step           {_duration(sum(times.values()))} at the rates of an H200"]
    lines += [f"  {name:<32} {_duration(seconds):>10}" for name, seconds in times.items() if seconds]
    if limits.device_bytes is not None:
        lines += [f"longest        {plan.longest(step, limits)} tokens"]
    return lines


def loaded(path: str, overrides: Sequence[str]) -> Config:
    """The configuration; of several nodes none has to be known by its address. Raises: ConfigError."""
    try:
        return load(path, overrides)
    except ConfigError as refusal:
        if not str(refusal).endswith("needs launch.master_address"):
            raise
        return load(path, [*overrides, "launch.master_address=unknown"])


def _cut(tokens: int, document: int) -> dict[int, int]:
    """Documents of that length, and one of what is left of the tokens: length -> how many."""
    return {document: tokens // document, tokens % document: 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 it fits, 2 refused with one sentence."""
    parser = argparse.ArgumentParser(
        prog="ringflash plan", description="Whether a run fits, and how long a step takes."
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change section.key of the file"
    )
    parser.add_argument(
        "--device-gb", type=_gigabytes, default=141.0, help="memory of a GPU, 10^9 bytes; left out: an H200's"
    )
    parser.add_argument("--host-gb", type=_gigabytes, help="memory of a machine, 10^9 bytes; left out: this one's")
    arguments = parser.parse_args(argv)
    try:
        from .model import config_of

        config = resolve(loaded(arguments.config, arguments.set))
        plan = Plan(config, config_of(config.model, config.sequence.length), config.world_size)
        device = config.memory.device_gb or arguments.device_gb
        host = host_bytes(config.memory.host_gb or arguments.host_gb)
        limits = Limits(round(device * GB), host, config.launch.processes_per_node)
    except ValueError as refusal:
        print(f"ringflash: {refusal}", file=sys.stderr)
        return 2
    print("\n".join(table(plan, limits, flops.RATES["H200"])))
    if refusal_ := plan.refusal(limits, flops.RATES["H200"]):
        print(f"ringflash: {refusal_}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
