"""The optional packages that a configuration needs: are they installed?"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .refusal import ConfigError
from .run import Config

LIGER = "0.8.5"  # older ones take fewer arguments


def check_packages(config: Config) -> None:
    """Refuse a run whose packages are missing. None is imported.

    Apart from `load`, because a plan needs none of them. Raises: ConfigError.
    """
    if config.memory.loss != "liger":
        return
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        found = None
    if found is None or Version(found) < Version(LIGER):
        is_there = "which is not installed" if found is None else f"but {found} is installed"
        raise ConfigError(
            f"memory.loss = 'liger' needs the package liger-kernel, {LIGER} or newer, {is_there}: "
            "pip install 'ringflash[liger]', or say 'chunked'"
        )
