"""The files of a checkpoint: each durable once written, none of them read as code, a failure kept until all ranks ask.

DeepSpeed hands every file that it saves or loads to a `Storage`. Called by `engine`, which imports this module only
when it starts DeepSpeed, since that looks for its accelerator at import.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

SAFE = [LossScaler, ZeroStageEnum, fragment_address]
"""What DeepSpeed 0.19.8 puts beside tensors and plain values: records, and an enumeration."""


class Storage(TorchCheckpointEngine):
    """Writes and reads with torch.save and torch.load.

    A rank that raised in the middle of DeepSpeed's collective save would leave the others waiting: so the first error
    is kept, what follows is not written, and `taken` tells it once the save is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[str, int] = {}
        self._error: str | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: the folder is made before the save, on the one rank that can say that it cannot be."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file and wait until it is on disk."""
        if self._error is not None:
            return
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
                self._sizes[Path(path).name] = os.fstat(file.fileno()).st_size
        except (OSError, RuntimeError) as error:  # torch's writer hides the OSError beneath a RuntimeError
            cause = error if isinstance(error, OSError) else error.__context__ or error
            self._error = f"{path} cannot be written: {getattr(cause, 'strerror', None) or cause}"

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file: tensors, plain values, SAFE. Raises: ValueError for anything else, and for a broken file."""
        try:
            with torch.serialization.safe_globals(SAFE):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} is not loaded: it is broken, or holds more than tensors and plain values, which could run "
                f"code ({str(error).splitlines()[0]})"
            ) from None
        except (OSError, RuntimeError, EOFError) as error:
            raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None

    def taken(self) -> tuple[dict[str, int], str | None]:
        """(name -> bytes of the files written since the last call, the first error or None)."""
        result = self._sizes, self._error
        self._sizes, self._error = {}, None
        return result
