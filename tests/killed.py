"""Saves a checkpoint in child processes, each killed at another access to a file, and prints what each left: a line of
JSON with the whole steps, and with those after one more save. The last child is not killed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from train import checkpoint
from train.checkpoint import Manifest, Mesh

MESH = Mesh(processes=1, data=1, ring=1, ulysses=1, zero=1)


def save(folder: Path, step: int) -> None:
    """What rank 0 does, with two small files in the place of DeepSpeed's."""
    partial = checkpoint.begin(folder, step)
    for name in ("model.pt", "optimizer.pt"):
        (partial / name).write_bytes(name.encode() * step)
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    position = {"samples": 4 * step, "digest": step}
    fields: dict[str, Any] = {
        "step": step,
        "tokens_seen": 0,
        "nonfinite": 0,
        "data": position,
        "mesh": MESH,
        "config": {},
    }
    checkpoint.publish(partial, Manifest(**fields, versions={}, files=files))
    checkpoint.prune(folder, keep_last=1, keep_every=None)


def steps(folder: Path) -> list[int]:
    return [found.manifest.step for found in checkpoint.whole(folder)[0]]


def save_and_die(folder: Path, access: int) -> int:
    """In a child: save step 20, and be killed at this access to a file of the folder. The child's status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    counter = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if event in writes and next(counter) == access:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(folder, 20)
    os._exit(0)


def main(folder: Path) -> None:
    for access in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 10)
        status = save_and_die(folder, access)
        left, torn = steps(folder), len(checkpoint.whole(folder)[1])
        save(folder, 20)
        names = sorted(path.name for path in folder.iterdir())
        print(json.dumps({"left": left, "torn": torn, "again": steps(folder), "names": names, "killed": status != 0}))
        if status == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
