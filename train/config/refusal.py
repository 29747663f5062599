"""ConfigError, and the one sentence for what pydantic refused, which `file.load` asks for."""

import difflib
import re
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one sentence for the person who wrote the file."""


def sentence(error: ValidationError, config: type[BaseModel]) -> str:
    """Name the first key that is wrong, its value, and what is accepted.

    A key nobody knows comes first: it is often the reason why another one is missing.
    """
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    kind, value, loc = problem["type"], problem["input"], _key_of(problem)
    name = ".".join(loc)
    if kind == "extra_forbidden":
        return _unknown(loc, _keys(config))
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return (
            f"the section [{name}] is missing"
            if len(loc) == 1
            else f"{name} is missing: {_keys(config)[_section(loc)][loc[-1]]}"
        )
    if kind == "model_type":
        return f"{name} = {value!r} is a value: the section [{name}] is accepted"
    wanted = " or ".join(p["msg"].removeprefix("Input should be ") for p in problems if _key_of(p) == loc)
    wanted = f"Input should be {wanted}" if problem["msg"].startswith("Input should be") else wanted
    for theirs, ours in (
        ("Input should be", "accepted is"),
        ("String should match pattern", "accepted is text that matches"),
        ("String should have", "accepted is text of"),
        ("List should have", "accepted is an array of"),
        (" after validation", ""),
        ("a valid integer", "an integer"),
        ("a valid", "a"),
    ):
        wanted = wanted.replace(theirs, ours)
    return f"{name} = {value!r} ({_toml_type(value)}): {wanted}"


def _key_of(problem: Any) -> tuple[str, ...]:
    """Where it stands in the file: pydantic names, behind the key, the kind of value that it tried."""
    return tuple(part for part in map(str, problem["loc"]) if not re.match(r"constrained-|literal\[", part))


def _unknown(loc: tuple[str, ...], keys: dict[str, dict[str, str]]) -> str:
    """The sentence for a key that does not exist, with the nearest one that does, in whichever section it stands."""
    key, section = loc[-1], _section(loc)
    homes = {f"{home}.{known}": known for home, table in keys.items() for known in table}
    beside = keys.get(section, {}) if section else keys
    near = [home for home, known in homes.items() if known == key]
    near += [f"{section}.{known}" if section else f"[{known}]" for known in difflib.get_close_matches(key, beside, n=1)]
    for known in difflib.get_close_matches(key, homes.values(), n=1):
        near += [home for home in homes if homes[home] == known]
    name, kind = (".".join(loc), "key") if section else (f"[{key}]", "section")
    if near:
        return f"{name} is not a {kind}: did you mean {near[0]}?"
    return f"{name} is not a {kind}: {f'[{section}] has' if section else 'there are'} {', '.join(beside)}"


def _section(loc: tuple[str, ...]) -> str:
    """The table in which a key stands, without its number where there are several."""
    return ".".join(part for part in loc[:-1] if not part.isdigit())


def _keys(config: type[BaseModel]) -> dict[str, dict[str, str]]:
    """section -> key -> what it means, from the sections of the model; data.sources is one of them."""
    found: dict[str, dict[str, str]] = {}
    tables = [(name, field.annotation) for name, field in config.model_fields.items()]
    for name, annotation in tables:
        if get_origin(annotation) is list:
            (annotation,) = get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found[name] = {key: _meaning(info) for key, info in annotation.model_fields.items()}
            tables += [(f"{name}.{key}", info.annotation) for key, info in annotation.model_fields.items()]
    return found


def _meaning(field: FieldInfo) -> str:
    """What a key means, behind the words that it accepts if it accepts no others."""
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    accepted = [f"accepted is {', '.join(map(repr, words))};"] if words else []
    return " ".join([*accepted, (field.description or "").strip()])


def _toml_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")
