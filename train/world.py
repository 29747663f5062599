"""The processes of a run: device, process groups, seeds, caches. The only init and destroy, the only reads of the
environment.

Ranks of one ring are consecutive: rank = data_rank * n + position, n = parallel.ring * parallel.ulysses. Called by
`__main__` and by the tests.
"""

import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringflash
from ringflash import exchange

from .config import Config
from .flops import windows_of
from .model import config_of

VERDICT_VARIABLE = "RINGFLASH_VERDICT_DIR"
"""Folder for the verdict of this rank; set by `launch`, absent under a bare torchrun."""

RESTART_VARIABLES = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
"""How often torchrun started the processes of a job again, and slurm the job itself."""

RECORDER_VARIABLE, RECORDER_ENTRIES = "TORCH_FR_BUFFER_SIZE", "2000"
"""Collectives that PyTorch's flight recorder keeps, for the report on a hang; unless the environment says otherwise."""


CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions"}
"""Where compiled kernels are kept: the variable -> folder below that of the job, unless the variable is set."""
JOB_VARIABLES = "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"
"""What slurm and torchrun call a job, the same on all its processes and again when they are started again."""


ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
"""What torch's allocator reads; the first is known to all versions."""


@dataclass(frozen=True)
class Place:
    """Where torchrun put this process. Without torchrun it is the only one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    verdict_dir: str | None
    under_torchrun: bool = False

    @classmethod
    def from_environment(cls) -> "Place":
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            verdict_dir=os.environ.get(VERDICT_VARIABLE),
            under_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        )


@dataclass(frozen=True, eq=False)
class World:
    """What a process knows of the others.

    rank, size: of all processes; device: where this one computes
    ring: the ranks that share this rank's sequences
    data_rank, data_size: which of how many sequences of a global batch this ring takes
    control: all ranks over gloo, for a few numbers a step on the host, so that a GPU is never waited for
    writing: the same ranks again, for the thread that writes a checkpoint meanwhile
    lifeline, board: for `watch`: all ranks over gloo, broken by a rank that is gone; words that all ranks can read
    restarted: whether torchrun or slurm started this process again in place of one of the same job
    windows: those that layers of the model have, None for layers without, where the layout is chosen by them
    """

    rank: int
    size: int
    device: torch.device
    ring: ringflash.Ring
    data_rank: int
    data_size: int
    control: dist.ProcessGroup
    writing: dist.ProcessGroup
    lifeline: dist.ProcessGroup
    board: dist.Store
    restarted: bool = False
    windows: tuple[int | None, ...] | None = None

    def layout(self, length: int, borders: list[int] | None = None) -> ringflash.Layout:
        """How the ranks of a ring share a sequence. borders: of the documents inside which attention stays."""
        windows = None if self.windows is None else list(self.windows)
        return self.ring.layout(length, cu_seqlens=borders, windows=windows)

    def gather(self, numbers: list[float]) -> np.ndarray:
        """The same few numbers of every rank, float64 [size, len(numbers)], on every rank. All ranks must call it."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.control)
        return torch.stack(rows).numpy()

    def settle(self) -> None:
        """Wait for the GPU of this rank, so that what it does is timed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain value of every rank, on every rank, for what is rare. All ranks must call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


@contextmanager
def start(config: Config, place: Place) -> Iterator[World]:
    """Join the other processes; leave them at the end.

    Raises: ConfigError for a world that the mesh does not fill; ValueError for more processes than GPUs, for a missing
        compiler or Python header, for a folder of caches that is not ours. All of it before any process waits for
        another.
    """
    config.batch(place.size)
    device = device_of(place)
    caches, told = keep_caches(config.train.name)
    if place.local_rank == 0:
        for line in (told, *idle_words(config)):
            print(f"ringflash: {line}", file=sys.stderr)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for it when it is imported
    else:
        check_toolchain()
        allocator = grow_segments()
        if place.local_rank == 0:
            print(f"ringflash: {allocator}", file=sys.stderr)
        torch.cuda.set_device(device)
    _seed(config, device)
    _init(config, place, device)
    yield connect(config, device)
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone
    if place.local_rank == 0:
        shutil.rmtree(caches, ignore_errors=True)  # after an error the job may be started again, and needs them


def connect(config: Config, device: torch.device) -> World:
    """The groups of a mesh inside processes that have met. All ranks must call it."""
    rank, size, shared = dist.get_rank(), dist.get_world_size(), config.sequence_parallel
    data_size = config.data_parallel(size)
    timeout = timedelta(seconds=config.train.timeout_s)
    rings = [dist.new_group(range(first, first + shared), timeout=timeout) for first in range(0, size, shared)]
    ring = ringflash.Ring(
        rings[rank // shared],
        layout=config.sequence.layout,
        ulysses=config.parallel.ulysses,
        timeout_s=config.train.timeout_s,
        topology=config.parallel.topology,
        arrangement=config.parallel.arrangement,
        transit=getattr(torch, config.parallel.transit),
    )
    control, writing = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    lifeline = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    store: Any = dist.distributed_c10d._get_default_store()
    board = store.clone()  # another thread may be waiting in the first
    restarted = any(int(os.environ.get(name, 0)) for name in RESTART_VARIABLES)
    windows = None
    if config.sequence.layout == "auto":
        windows = tuple(dict.fromkeys(windows_of(config_of(config.model, config.sequence.length))))
    return World(
        rank, size, device, ring, rank // shared, data_size, control, writing, lifeline, board, restarted, windows
    )


def idle_words(config: Config) -> list[str]:
    """What is to be told of keys that change nothing: one config file serves one GPU and many, so they are no error."""
    parallel = config.parallel
    given = [("arrangement", parallel.arrangement, (None, "ring")), ("transit", parallel.transit, ("float32",))]
    said = [f"parallel.{name} = {value!r}" for name, value, plain in given if value not in plain]
    words = [f"{' and '.join(said)}: nothing to act on where parallel.ring = 1"] if said and parallel.ring == 1 else []
    memory = config.memory
    if memory.loss == "liger" and "loss_chunk" in memory.model_fields_set and config.evaluation.every is None:
        words.append(f"memory.loss_chunk = {memory.loss_chunk}: of an evaluation alone where memory.loss = 'liger'")
    return words


def device_of(place: Place) -> torch.device:
    """The GPU with this process's local rank, or the CPU of a machine without GPUs. ValueError if GPUs are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if max(place.local_rank, place.local_size - 1) >= gpus:
        raise ValueError(
            f"LOCAL_RANK={place.local_rank} of {place.local_size} processes, but this machine shows {gpus} GPUs: "
            f"at most {gpus} processes a node"
        )
    return torch.device("cuda", place.local_rank)


def check_toolchain() -> None:
    """Refuse a GPU machine that cannot build what Triton compiles at the start of each kernel."""
    compilers = [name for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name]
    if not any(shutil.which(name) for name in compilers):
        raise ValueError(f"no C compiler is found ({', '.join(compilers)}), Triton needs one: install gcc or set CC")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ValueError(f"{header} is missing, Triton needs it: install python{sys.version_info[0]}-dev")


def grow_segments() -> str:
    """Let torch's memory of a GPU grow in place, before its first allocation: layers of all sizes leave fewer gaps.

    Returns what is to be told; a variable that is set already stays.
    """
    given = next((variable for variable in ALLOCATOR_VARIABLES if variable in os.environ), None)
    variable = given or ALLOCATOR_VARIABLES[0]
    os.environ.setdefault(variable, "expandable_segments:True")
    return f"torch's allocator has {variable}={os.environ[variable]}{', as it was set' if given else ''}"


def keep_caches(name: str) -> tuple[Path, str]:
    """Give what is compiled a place on this node, of this job: a shared home is slow, and many processes race there.

    name: of the run. Returns the folder, and what is to be told of it; a variable of CACHES that is set already stays.
    Raises: ValueError for a folder of another user, who could put programs there.
    """
    job = next((os.environ[variable] for variable in JOB_VARIABLES if os.environ.get(variable)), "alone")
    base = Path(tempfile.gettempdir()) / f"ringflash-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o022:
        raise ValueError(f"{base} is not a folder that you alone write: remove it, or set TMPDIR to another place")
    folder = base / re.sub(r"[^\w.-]", "_", f"{name}-{job}")
    chosen = [f"{variable}={os.environ[variable]}" for variable in CACHES if variable in os.environ]
    for variable, below in CACHES.items():
        os.environ.setdefault(variable, str(folder / below))
    return folder, "; ".join([f"{os.uname().nodename} keeps what it compiles in {folder}", *chosen])


def _seed(config: Config, device: torch.device) -> None:
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    if config.train.deterministic:
        if device.type == "cuda":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is refused
        torch.use_deterministic_algorithms(True)


def _init(config: Config, place: Place, device: torch.device) -> None:
    backend = "gloo" if device.type == "cpu" else "nccl"
    timeout = timedelta(seconds=config.train.timeout_s)
    os.environ.setdefault(RECORDER_VARIABLE, RECORDER_ENTRIES)
    if backend == "nccl":
        os.environ.setdefault(exchange.PRIORITY, "1")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        os.environ["LOCAL_RANK"] = str(place.local_rank)  # DeepSpeed insists on it
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
