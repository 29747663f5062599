"""From a TOML file and `--set` overrides to a `Config`."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .refusal import ConfigError, sentence
from .run import Config


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a TOML file, changed by overrides of the form `section.key=value`.

    A value is read as TOML; what is not TOML is a string, so that `data.path=/tmp/text` needs no quotes.
    Raises: ConfigError, one sentence, for everything that is wrong with file, override, key or value.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not TOML: {error}") from None
    for override in overrides:
        _override(tables, override)
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(sentence(error, Config)) from None


def _override(tables: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = (part.strip() for part in name.split("."))
    if not equals or not sections or not all((*sections, key)):
        raise ConfigError(f"--set {override!r}: the form section.key=value is accepted")
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a table")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    tables[key] = parsed["value"] if parsed.keys() == {"value"} else text.strip()
