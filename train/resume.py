"""Going on from a checkpoint: which one, whether it fits, what changed since. Mesh and ZeRO stage may be others.

Called by `loop` and `evaluation`.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from . import checkpoint, randomness
from .checkpoint import Found
from .config import Config, heads, was_pruned
from .data import Windows
from .engine import Engine
from .nonfinite import Guard
from .partitions import Piece
from .saver import RANDOM, Progress, mesh_of, say, together
from .storage import Reader, StorageError
from .world import World

FIXED = (
    "model.",
    "train.trainable",
    "lora.",
    "optimizer.name",
    "optimizer.momentum",
)
"""Keys that must be as they were: the weights or the optimizer's state fit no other."""

LOOSE = ("model.rope.", "model.pretrained")
"""Of these, what may change: with the length of the sequences; and a folder may move, see `check_base`."""

FREE = ("checkpoint.", "evaluation.", "metrics.", "launch.", "slurm.", "kubernetes.")
"""Keys that change nothing of what is trained."""


Chosen = TypeVar("Chosen")


def base_of(config: Config, world: World) -> str | None:
    """Fingerprint of the weights beside adapters, on all ranks; None where a checkpoint holds all weights itself.

    All ranks must call it. Raises: ValueError, the same sentence on all, for a folder that cannot be read.
    """
    folder = config.model.pretrained
    if config.train.trainable != "lora" or folder is None:
        return None
    return _from_first(world, lambda: heads.fingerprint(Path(folder)))


def choose(config: Config, world: World, *, base: str | None) -> Found | None:
    """The checkpoint that checkpoint.resume asks for, before anything is built for it; None: a fresh start.

    base: see `base_of`
    All ranks must call it. Raises: ValueError, the same sentence on all, for a checkpoint that does not fit the run.
    """
    restarted = bool(world.gather([float(world.restarted)]).any())  # torchrun counts on the node that failed alone
    return _from_first(world, lambda: _choose(config, world, base=base, restarted=restarted))


def holds_all(chosen: Found | None, config: Config) -> bool:
    """Whether a checkpoint fills all weights of the model, so that they need not come from elsewhere before."""
    return chosen is not None and config.train.trainable == "all"


def resume(
    chosen: Found | None, config: Config, world: World, engine: Engine, windows: Windows, guard: Guard
) -> Progress:
    """Load what `choose` chose. Returns where the run goes on from: (0, 0) at its start.

    All ranks must call it. Raises: ValueError, the same sentence on all, for a checkpoint that does not fit the run.
    """
    if chosen is None:
        return Progress(0, 0)
    path, manifest = chosen
    guard.met = manifest.nonfinite
    windows.restore(manifest.data)  # before gigabytes are read: other data are refused here
    random = _load(path, world, engine, same_mesh=_reseeded(chosen, config, world) == "")
    if random is None:
        randomness.reseed(config.train.seed, manifest.step, world.rank)
    else:
        randomness.restore(random, world.device)
    return Progress(manifest.step, manifest.tokens_seen)


def _from_first(world: World, choose: Callable[[], Chosen]) -> Chosen:
    """What rank 0 chooses, on all ranks. Raises: ValueError, the same sentence on all, for what it raised."""
    chosen: tuple[Any, str | None] = None, None
    if world.rank == 0:
        try:
            chosen = choose(), None
        except (ValueError, OSError) as raised:
            chosen = None, str(raised)
    value, error = together(world, chosen)[0]
    if error is not None:
        raise ValueError(error)
    return value


def _choose(config: Config, world: World, *, base: str | None, restarted: bool) -> Found | None:
    """The checkpoint to resume, with what is to be said about it; None: a fresh start."""
    wanted, folder = config.checkpoint.resume, config.checkpoint_dir
    found, torn = checkpoint.whole(folder)
    newest = found[-1] if found else None
    if wanted == "auto" or restarted:
        for sentence in torn:
            say(f"{sentence}; it is passed over")
    if wanted == "no":
        chosen = None
    elif wanted == "auto" or (restarted and was_pruned(Path(wanted), config)):
        chosen = newest
    else:
        chosen = checkpoint.read(Path(wanted))
    done = chosen.manifest.step if chosen else 0
    if newest and newest.manifest.step > done and config.checkpoint.every is not None:
        if restarted:  # those behind it are of this job: its first start refused any other
            return _fitting(newest, config, world, base)
        raise ValueError(
            f"checkpoint.resume = {wanted!r} starts behind step {done}, but checkpoint.dir = {str(folder)!r} holds "
            f"step {newest.manifest.step}: another checkpoint.dir, or checkpoint.resume = 'auto' is accepted"
        )
    if chosen:
        return _fitting(chosen, config, world, base)
    if wanted == "auto" and config.checkpoint.every is not None:
        say(f"no whole checkpoint is in {folder}: the run starts at step 1")
    return None


def _fitting(chosen: Found, config: Config, world: World, base: str | None) -> Found:
    """A checkpoint that fits the run, and is said to be resumed. Raises: ValueError for one that does not."""
    check_steps(chosen, config.train.steps)
    changes = [f"with {change}" for change in compare(chosen, config.model_dump(mode="json"))]
    check_base(chosen, config.model.pretrained, base)
    said = [f"resumes {chosen.path} behind step {chosen.manifest.step}", *changes, _reseeded(chosen, config, world)]
    say(", ".join(filter(None, said)))
    return chosen


def _reseeded(found: Found, config: Config, world: World) -> str:
    """Why no rank finds its random states again; empty on the mesh that saved them, whatever its ZeRO stage."""
    saved, now = found.manifest.mesh, mesh_of(config, world)
    if saved.model_copy(update={"zero": now.zero}) == now:
        return ""
    return f"saved by {saved}: random states are seeded anew from train.seed, step and rank"


def _load(
    path: Path, world: World, engine: Engine, *, same_mesh: bool = False, trains: bool = True
) -> dict[str, Any] | None:
    """Fill the engine. Returns the random states of this rank on the same mesh. Raises: ValueError, on all ranks.

    trains: whether it gets the optimizer's state too
    """
    reader, error = None, None
    try:
        reader = Reader(path)
    except ValueError as raised:
        error = str(raised)
    _agree(world, error)
    assert reader is not None
    name = RANDOM.format(world.rank)
    values: dict[str, Any] = {}

    def read(pieces: list[Piece]) -> None:
        _agree(world, reader.refuses(pieces))
        values.update(reader.fill(pieces, [name] if same_mesh else [], world.control))

    try:
        engine.fill(reader.kinds() if trains else (), read)
    except StorageError as error:
        raise ValueError(error.reason) from None
    return values.get(name)


def _agree(world: World, error: str | None) -> None:
    """Raise the first error of all ranks on each."""
    for told in together(world, error):
        if told is not None:
            raise ValueError(told)


def choose_to_evaluate(config: Config, world: World) -> Found | None:
    """The checkpoint that checkpoint.resume asks for, to be evaluated; None: the weights that a run begins with.

    All ranks must call it. Raises: ValueError, the same sentence on all ranks, if there is no checkpoint or it holds
        another model.
    """
    base = base_of(config, world)
    return _from_first(world, lambda: _to_evaluate(config, base))


def load_weights(chosen: Found | None, world: World, engine: Engine) -> Progress:
    """Load the weights of what `choose_to_evaluate` chose. Returns how far the run was. All ranks must call it.

    Raises: ValueError, the same sentence on all ranks, if they are not those of the model.
    """
    if chosen is None:
        return Progress(0, 0)
    path, manifest = chosen
    _load(path, world, engine, trains=False)
    return Progress(manifest.step, manifest.tokens_seen)


def _to_evaluate(config: Config, base: str | None) -> Found | None:
    wanted, folder = config.checkpoint.resume, config.checkpoint_dir
    if wanted == "no":
        return None
    if wanted == "auto":
        found, torn = checkpoint.whole(folder)
        for sentence in torn:
            say(f"{sentence}; it is passed over")
        if not found:
            raise ValueError(
                f"no whole checkpoint is in checkpoint.dir = {str(folder)!r}: --checkpoint with the folder of one is "
                "accepted, or checkpoint.resume = 'no' for the weights that the run begins with"
            )
        chosen = found[-1]
    else:
        chosen = checkpoint.read(Path(wanted))
    compare(chosen, config.model_dump(mode="json"), fixed=("model.", "train.trainable", "lora."))
    check_base(chosen, config.model.pretrained, base)
    return chosen


def check_steps(found: Found, steps: int) -> None:
    """Refuse a checkpoint behind the end of the run."""
    if found.manifest.step > steps:
        raise ValueError(f"{found.path} was saved behind step {found.manifest.step}, train.steps = {steps} is less")


def check_base(found: Found, folder: str | None, base: str | None) -> None:
    """Refuse adapters beside other weights than they were trained with. folder: of this run's; base: see `base_of`.

    A checkpoint that knows no fingerprint, from before there were any, must name the same folder. Raises: ValueError.
    """
    saved, before = found.manifest.base, found.manifest.config["model"].get("pretrained")
    if base is None or saved == base or (saved is None and before == folder):
        return
    known = f"fingerprint {saved[:12]}" if saved else "no fingerprint"
    raise ValueError(
        f"{found.path} holds adapters of model.pretrained = {before!r} ({known}), this run has {folder!r} "
        f"(fingerprint {base[:12]}), whose weights may be others: the folder with the weights that they were trained "
        "with is accepted, wherever it is, or checkpoint.resume = 'no'"
    )


def compare(found: Found, now: dict[str, Any], fixed: tuple[str, ...] = FIXED) -> list[str]:
    """What changed in the config since a checkpoint was saved, a phrase a key, but for FREE.

    now: the config of this run, as JSON; fixed: beginnings of the keys that must be as they were
    Raises: ValueError for one of those, naming both values.
    """
    before, after = _flat(found.manifest.config), _flat(now)
    changed = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    for key in changed:
        if key.startswith(fixed) and not key.startswith(LOOSE):
            raise ValueError(
                f"{found.path} was saved with {_named(key, before, after)}, this run has "
                f"{_named(key, after, before)}: the value that was saved is accepted, or checkpoint.resume = 'no'"
            )
    return [f"{key} {_shown(key, after)} (was {_shown(key, before)})" for key in changed if not key.startswith(FREE)]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value of a nested table, without what is None."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _named(key: str, here: dict[str, Any], there: dict[str, Any]) -> str:
    """key = value; where it has none, the key that may have taken its place: one that is not there either."""
    if key in here:
        return f"{key} = {here[key]!r}"
    near = difflib.get_close_matches(key, here.keys() - there.keys(), n=1)
    return f"{key} left out" + (f" and {near[0]} = {here[near[0]]!r}" if near else "")


def _shown(key: str, table: dict[str, Any]) -> str:
    return repr(table[key]) if key in table else "left out"
