"""Persistent worlds of processes, gloo or NCCL: started once a world size, cases are sent to them.

    results = pool(4)(body, *args)     # body(*args) on every rank of a world of 4; one result a rank
    outcomes = pool(4).outcomes(...)   # the same, but what a rank raised comes back instead of being raised here

`body` is a top-level function of an importable module. Inside it torch.distributed is ready. After an error the world
is thrown away, since a rank may have left messages behind, and the next call starts a new one.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import random
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

CASE_S = 150.0  # a case that takes longer hangs


PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.run", "deepspeed"]
PRELOADED += ["transformers.models.llama.modeling_llama", "torch._inductor.compile_fx", "train.loop"]  # or in each rank


def context(backend: str) -> Any:
    """How processes start. Those without a GPU are forks of one that has imported what takes seconds and no thread."""
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def as_torchrun(command: list[str], variables: dict[str, str]) -> None:
    """Body of a process of `context`: what `python -m torch.distributed.run` does, without the time to import torch."""
    os.environ |= variables
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def as_rank(words: list[str], variables: dict[str, str], folder: str, log: str) -> None:
    """Body of a process of `context`: what `python WORDS` does in a folder, its output in files."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= variables
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_CREAT | os.O_WRONLY), number)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def ranks(words: list[str], folder: pathlib.Path, **variables: str) -> list[subprocess.CompletedProcess]:
    """What two processes that torchrun starts do and say, without it and without the time to import torch."""
    started, port, logs = context("gloo"), free_port(), [f"{folder}/rank{rank}" for rank in range(2)]
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        started.Process(
            target=as_rank, args=(words, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(folder), log)
        )
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(CASE_S)
        process.kill()
    said = [[pathlib.Path(f"{log}.{name}").read_text() for name in ("out", "err")] for log in logs]
    return [
        subprocess.CompletedProcess(words, process.exitcode, *one) for process, one in zip(processes, said, strict=True)
    ]


def free_port() -> int:
    """A port to listen on, of those that the kernel gives to no connection of another test meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # tests seed `random`, and two workers would draw alike
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class World:
    """`size` processes that share a group and run one case after another; with NCCL each has a GPU."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._workers: list[tuple[Any, Any]] = []

    def __call__(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        outcomes = self.outcomes(body, *args)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise AssertionError(f"rank {rank} of {self.size} raised") from outcome
        return outcomes

    def outcomes(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, or the exception that it raised, with its traceback as a note."""
        if not self._workers:
            self._start()
        self._signal(signal.SIGCONT)
        for _, pipe in self._workers:
            pipe.send((body, args))
        outcomes = [self._receive(rank, pipe) for rank, (_, pipe) in enumerate(self._workers)]
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            self.close()
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: signal.Signals) -> None:
        """Between cases processes of gloo are stopped: each group has a thread that wakes up 100 times a second."""
        for process, _ in self._workers if self.backend == "gloo" else []:
            os.kill(process.pid, number)

    def _start(self) -> None:
        started = context(self.backend)
        port = free_port()
        for rank in range(self.size):
            here, there = started.Pipe()
            process = started.Process(target=_work, args=(rank, self.size, self.backend, port, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _receive(self, rank: int, pipe: Any) -> Any:
        try:
            if pipe.poll(CASE_S):
                return pipe.recv()
        except EOFError:
            return RuntimeError(f"rank {rank} died")
        return TimeoutError(f"rank {rank} did not answer within {CASE_S:g} s")

    def close(self) -> None:
        """End the processes; the next case starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def _work(rank: int, size: int, backend: str, port: int, pipe: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["LOCAL_RANK"] = str(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "2000", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # as train.world does
    if backend == "nccl":
        torch.cuda.set_device(rank)
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    dist.init_process_group(backend, rank=rank, world_size=size)
    gc.freeze()  # or each of DeepSpeed's full collections looks through all that was imported
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            os._exit(0)  # libraries beneath us abort at a normal exit now and then
        try:
            result = body(*args)
        except BaseException as error:
            error.add_note("".join(traceback.format_exception(error)))
            result = error
        try:
            pipe.send(result)
        except Exception:
            pipe.send(RuntimeError(f"a result or error could not be sent: {result!r}"))
