"""Bodies for the tests of failures: a step that is not finite, a rank that sleeps, one that is gone, a full memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import training

from ringflash import exchange
from train import engine, loop, watch, world
from train.config import Config
from train.nonfinite import NonFiniteError
from train.out_of_memory import OutOfMemoryError


def state_of(run: loop.Run) -> str:
    """A digest of the weights and of the optimizer's state."""
    optimizer = getattr(run.engine._engine.optimizer, "optimizer", run.engine._engine.optimizer)
    moments = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, torch.Tensor)]
    tensors = [*run.engine.full_parameters().values(), *moments]
    return hashlib.sha256(b"".join(t.detach().float().cpu().numpy().tobytes() for t in tensors)).hexdigest()


FAULTS = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss + math.inf,  # its gradient is finite
    "gradient": lambda loss: spoiled(loss * 1),
}


def spoiled(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


def nonfinite(config: Config, fault: str) -> dict[str, Any]:
    """Body: four steps, in the second and the fourth of which rank 1 spoils its third micro-batch."""
    run = loop.prepare(config, training.join(config))
    forward, calls = engine.Engine.__call__, []

    def faulty(self: engine.Engine, *args: Any) -> Any:
        calls.append(args)
        loss = forward(self, *args)
        bad = run.world.rank == 1 and len(calls) in (7, 15)
        return FAULTS[fault](loss) if bad else loss

    said, states, records, refusal = io.StringIO(), [], [], ""
    with patch.object(engine.Engine, "__call__", faulty), contextlib.redirect_stderr(said):
        for step in range(1, 5):
            states.append(state_of(run))
            try:
                records.append(loop.train_step(run, step, tokens_seen=0))
            except NonFiniteError as error:
                refusal = str(error)
    states.append(state_of(run))
    run.engine.close()
    ours = [line for line in said.getvalue().splitlines() if line.startswith("ringflash: ")]
    return {"states": states, "records": records, "said": ours, "refusal": refusal}


PLACES = {"ring": (exchange.Processes, "post"), "collective": (engine.Engine, "backward")}


def hang(config: Config, place: str) -> list[str]:
    """Body: rank 1 sleeps in step 5, before a hop or a backward. What each rank would say at its end."""
    said: list[str] = []
    run = loop.prepare(config, training.join(config), fail=said.append)
    go_on, asleep = getattr(*PLACES[place]), f"asleep before {place}"

    def sleepy(*args: Any, **options: Any) -> Any:
        if run.watch.step == 5:
            if run.world.rank == 1:
                run.world.board.set(asleep, "")
            run.world.board.wait([asleep], timedelta(seconds=60))  # on a busy machine rank 1 may be far behind
            run.watch._since = time.monotonic()  # or the time is over before rank 0 waits
        watch.FLOOR_S = 3.0 if run.watch.step == 5 else 120.0  # of other steps none is late there
        while run.watch.step == 5 and run.world.rank == 1 and not said:
            time.sleep(0.05)
        return go_on(*args, **options)

    with patch.multiple(watch, FLOOR_S=120.0, FACTOR=0.0), patch.object(*PLACES[place], sleepy):
        loop.fit(run)
    run.engine.close()
    return said


def told_before(config: Config) -> bool:
    """Body: whether a watch finds what a run before it said of this rank."""
    joined = world.connect(config, training.device())
    key = f"hang/{joined.rank}"
    joined.board.set(key, '[5, "forward", "a message of that run"]')
    with watch.Watch(config, joined, print):
        return joined.board.check([key])


def gone(config: Config) -> tuple[list[str], float]:
    """Body: the last rank is killed while all main threads wait for nothing that would tell them."""
    said: list[str] = []
    joined = world.connect(config, training.device())
    with watch.Watch(config, joined, said.append) as watching:
        watching.begin(7, "backward")
        time.sleep(0.5)
        if joined.rank == joined.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        killed = time.monotonic()
        while not said and time.monotonic() < killed + 20:
            time.sleep(0.05)
        return said, time.monotonic() - killed


def exhausted(config: Config) -> str:
    """Body: the backward of every rank finds no memory."""
    run = loop.prepare(config, training.join(config))

    def full(self: engine.Engine, *args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        with patch.object(engine.Engine, "backward", full):
            loop.fit(run)
    except OutOfMemoryError as error:
        return str(error)
    finally:
        run.engine.close()
    return "it went on"


def counted(config: Config) -> int:
    """Body: how many steps that were not finite a run knows of which goes on behind the second."""
    run = loop.prepare(config, training.join(config))
    run.guard.met = 2
    loop.fit(run)
    run.engine.close()
    again = loop.prepare(config, training.join(config))
    again.engine.close()
    return again.guard.met
