"""`make wheel`: build the wheel, see that it claims the name `ringflash` only, install it alone, use it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ROOMS = {
    "ringflash": "ringflash",
    "train": "ringflash/train",
    "launch": "ringflash/launch",
    "configs": "ringflash/configs",
}


def run(command: list[str], **given) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **given)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel of the tracked files: what lies about in the checkout (build/, egg-info) must not leak into it."""
    source = folder / "source"
    for name in run(["git", "ls-files", "-z"], cwd=REPO).split("\0")[:-1]:
        if (REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(source)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_claims(wheel: Path) -> None:
    """Every file lies under ringflash/ or in the wheel's own dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
        record = [line.split(",")[0] for line in archive.read(f"{info}/RECORD").decode().splitlines()]
        top_level = archive.read(f"{info}/top_level.txt").decode().split()
    strangers = [name for name in {*names, *record} if name.split("/")[0] not in ("ringflash", info)]
    tracked = run(["git", "ls-files", "-z", *ROOMS], cwd=REPO).split("\0")[:-1]
    here = [Path(name) for name in tracked if (REPO / name).is_file()]
    needed = [f"{ROOMS[path.parts[0]]}/{path.relative_to(path.parts[0]).as_posix()}" for path in here]
    missing = [name for name in (*needed, f"{info}/licenses/LICENSE") if name not in names]
    if strangers or missing or top_level != ["ringflash"]:
        raise SystemExit(f"the wheel claims {top_level}, holds {strangers} and lacks {missing}")


def check_use(wheel: Path, folder: Path) -> None:
    """From an empty folder, with nothing of the checkout in reach, the library computes and the command answers."""
    target = folder / "installed"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)])
    away = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(target)}}
    code = (
        "import ringflash, torch; q = torch.ones(1, 4, 1, 16); ringflash.attention(q, q, q); print(ringflash.__file__)"
    )
    where = run([sys.executable, "-P", "-c", code], **away)
    if not where.startswith(str(target)):
        raise SystemExit(f"another ringflash was imported: {where}")
    run([sys.executable, "-P", "-m", "ringflash.launch", "--help"], **away)
    config = target / "ringflash" / "configs" / "demo.toml"
    plan = run([sys.executable, "-P", "-m", "ringflash.launch", str(config), "--dry-run"], **away)
    if "ringflash.train" not in plan:
        raise SystemExit(f"the installed launch would start something else than the installed trainer: {plan}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        wheel = build(Path(name))
        check_claims(wheel)
        check_use(wheel, Path(name))
        print(f"{wheel.name}: claims only ringflash, computes and launches from an empty folder")


if __name__ == "__main__":
    main()
