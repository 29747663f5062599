"""The folders that a configuration names: are they there, do they hold something, can they be written?"""

from pathlib import Path

from .refusal import ConfigError
from .run import Config


def check_paths(config: Config) -> None:
    """Refuse folders that are not there, hold nothing to read, or cannot be written.

    Apart from `load`, because a login node need not have them. Raises: ConfigError.
    """
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"metrics.dir = {config.metrics.dir!r} cannot be written: {error.strerror}") from None
    if config.checkpoint.every is not None:
        try:
            config.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.dir = {str(config.checkpoint_dir)!r} cannot be written: {error.strerror}"
            ) from None
    if config.data.path != "stdlib":
        folder = Path(config.data.path)
        if not folder.is_dir():
            raise ConfigError(
                f"data.path = {config.data.path!r} is not a folder: a folder of text files or 'stdlib' is accepted"
            )
        if not any(file.is_file() for file in folder.glob(config.data.pattern)):
            raise ConfigError(
                f"data.path = {config.data.path!r} holds no file that fits data.pattern = {config.data.pattern!r}"
            )
    if config.data.tokenizer != "bytes" and not Path(config.data.tokenizer).is_dir():
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} is not a folder: 'bytes' or a local folder is accepted"
        )
