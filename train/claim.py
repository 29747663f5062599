"""One run at a time in a folder: two that wrote the same checkpoints and metrics would remove each other's.

A lock of POSIX, which ends with its process, however that ends, and which network file systems know. Called by `loop`.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from .config import Config
from .saver import say, together
from .world import World

LOCK = "run.lock"

RESTART_S = 120
"""How long a run that was started again waits for what another machine knows of the process before it."""

POLL_S = 0.2
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Claim:
    """That this process alone writes into some folders, until `release` or its end.

    patience_s: how long to wait for another process that holds one
    Raises: ValueError naming the process that goes on holding one; OSError.
    """

    def __init__(self, folders: Sequence[Path], *, patience_s: float = 0) -> None:
        self._files: list[TextIOWrapper] = []
        end = time.monotonic() + patience_s
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
            self._files.append(file)
            while not _locked(file):
                if time.monotonic() >= end:
                    file.seek(0)
                    holder = " ".join(file.read(200).split()) or "another process"
                    self.release()
                    raise ValueError(
                        f"{folder} is written to by another run, {holder}: its end, or another train.name, metrics.dir "
                        "or checkpoint.dir is accepted"
                    )
                time.sleep(POLL_S)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()

    def release(self) -> None:
        for file in self._files:
            file.close()
        self._files = []


def of_run(config: Config, world: World) -> Claim | None:
    """The claim on the folders that a run writes to, by rank 0. All ranks must call it.

    Raises: ValueError, the same sentence on all ranks.
    """
    claim, error = None, None
    if world.rank == 0:
        folders = [config.run_dir]
        if config.checkpoint.every is not None and config.checkpoint.dir is not None:
            folders.append(config.checkpoint_dir)
        try:
            claim = Claim(folders, patience_s=RESTART_S if world.restarted else 0)
        except (ValueError, OSError) as raised:
            error = str(raised)
    error = together(world, error)[0]
    if error is not None:
        raise ValueError(error)
    return claim


def _locked(file: TextIOWrapper) -> bool:
    """Whether nobody else has it now. A file system without locks is told of, and taken as it is."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(f"{file.name} cannot be locked ({error.strerror}): that no other run writes there is not known")
    return True
