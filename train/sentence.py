"""One sentence for a configuration that pydantic refused. Called by `config.load`."""

import difflib

from pydantic import BaseModel, ValidationError


def sentence(error: ValidationError, config: type[BaseModel]) -> str:
    """Name the first key that is wrong, its value, and what is accepted.

    A key nobody knows comes first: it is often the reason why another one is missing.
    """
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    kind, value, loc = problem["type"], problem["input"], tuple(map(str, problem["loc"]))
    name = ".".join(loc)
    if kind == "extra_forbidden":
        return _unknown(loc, _keys(config))
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return (
            f"the section [{name}] is missing"
            if len(loc) == 1
            else f"{name} is missing: {_keys(config)[loc[0]][loc[1]]}"
        )
    if kind == "model_type":
        return f"{name} = {value!r} is a value: the section [{name}] is accepted"
    wanted = problem["msg"]
    for theirs, ours in (
        ("Input should be", "accepted is"),
        ("String should match pattern", "accepted is text that matches"),
        ("List should have", "accepted is an array of"),
        (" after validation", ""),
        ("a valid integer", "an integer"),
        ("a valid", "a"),
    ):
        wanted = wanted.replace(theirs, ours)
    return f"{name} = {value!r} ({_toml_type(value)}): {wanted}"


def _unknown(loc: tuple[str, ...], keys: dict[str, dict[str, str]]) -> str:
    """The sentence for a key that does not exist, with the nearest one that does, in whichever section it stands."""
    name = ".".join(loc)
    *sections, key = loc
    section = sections[0] if sections else None
    if section is None and (near := difflib.get_close_matches(key, keys, n=1)):
        return f"[{name}] is not a section: did you mean [{near[0]}]?"
    homes = {f"{home}.{known}": known for home, table in keys.items() for known in table}
    candidates = [home for home, known in homes.items() if known == key]
    candidates += [f"{section}.{near}" for near in difflib.get_close_matches(key, keys.get(section or "", ()), n=1)]
    candidates += [
        home for near in difflib.get_close_matches(key, homes.values(), n=1) for home in homes if homes[home] == near
    ]
    if candidates:
        return f"{name} is not a key: did you mean {candidates[0]}?"
    listed = (
        f"the keys of [{section}] are {', '.join(keys[section])}" if section else f"the sections are {', '.join(keys)}"
    )
    return f"{name} is not a key: {listed}"


def _keys(config: type[BaseModel]) -> dict[str, dict[str, str]]:
    """section -> key -> what it means, from the sections of the model."""
    return {
        name: {key: (info.description or "").strip() for key, info in field.annotation.model_fields.items()}
        for name, field in config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _toml_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")
