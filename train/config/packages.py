"""The optional packages that a configuration needs: are they installed?"""

from importlib.util import find_spec

from .refusal import ConfigError
from .run import Config


def check_packages(config: Config) -> None:
    """Refuse a run whose packages are missing. None is imported.

    Apart from `load`, because a plan needs none of them. Raises: ConfigError.
    """
    if config.memory.loss == "liger" and find_spec("liger_kernel") is None:
        raise ConfigError(
            "memory.loss = 'liger' needs the package liger-kernel, which is not installed: "
            "pip install liger-kernel, or say 'chunked'"
        )
