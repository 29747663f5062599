"""The bars that the kernels must clear: which cells are measured for them, and the verdict on the rows. No GPU here.

Each bar compares our rate with another contender's in the same cell. A missed floor fails; a missed goal is said.
Called by attention.py, and by docs/render.py for the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from cases import Case, Cell, Contender

FAST = Contender("gluon")
PORTABLE = Contender("triton")
FP8 = Contender("gluon_fp8")
STEADY = Contender("gluon", "deterministic")
CUDNN, FLEX, FA4 = Contender("cudnn"), Contender("flex"), Contender("fa4")
ON_CAUSAL, ONE_HOP, CARRIED = (Contender("gluon", form) for form in ("causal", "one hop", "carried"))
LONG = (16384, 65536)
SHORT, LOCAL = 4096, 8192
PLAIN = ("full", "causal")


class Bar(NamedTuple):
    """floor, goal: (contender, what share of its rate) or None; together: judged by the geometric mean of its cells."""

    name: str
    ours: Contender
    cases: tuple[Case, ...]
    floor: tuple[Contender, float] | None
    goal: tuple[Contender, float] | None
    together: bool = False


class Line(NamedTuple):
    """A line of the verdict. floor, goal: our rate over the other's, None where it was not measured."""

    bar: Bar
    where: str
    tflops: float | None
    floor: float | None
    goal: float | None

    @property
    def floor_met(self) -> bool:
        return self.bar.floor is None or (self.floor is not None and self.floor >= self.bar.floor[1])

    @property
    def goal_met(self) -> bool | None:
        """None if there is no goal, or nothing to hold against it."""
        if self.bar.goal is None or self.goal is None:
            return None
        return self.goal >= self.bar.goal[1]


def _cases(head_dims=(128, 64), lengths=LONG, masks=PLAIN, directions=("forward", "backward")) -> tuple[Case, ...]:
    return tuple(Case(d, n, mask, way) for way in directions for d in head_dims for mask in masks for n in lengths)


def table() -> list[Bar]:
    short = _cases(lengths=(SHORT,))
    hard = _cases((64,), (SHORT,), ("causal",), ("forward",))
    easy = tuple(case for case in short if case not in hard)
    forward, backward = {"directions": ("forward",)}, {"directions": ("backward",)}
    return [
        Bar("fast", FAST, _cases(), (CUDNN, 0.98), (FA4, 1.00)),
        Bar("fast, geometric mean", FAST, _cases(), (CUDNN, 1.00), (FA4, 1.00), together=True),
        Bar("fast at 4k", FAST, easy, (CUDNN, 0.95), (CUDNN, 1.00)),
        Bar("fast at 4k", FAST, hard, (CUDNN, 0.90), (CUDNN, 1.00)),
        Bar("D=256", FAST, _cases((256,), **forward), (CUDNN, 0.95), (FA4, 1.00)),
        Bar("D=256", FAST, _cases((256,), **backward), (FLEX, 1.00), (FA4, 1.00)),
        Bar("portable", PORTABLE, _cases((128,), **forward), (FLEX, 1.05), (CUDNN, 0.95)),
        Bar("portable", PORTABLE, _cases((128,), **backward), (FLEX, 1.00), None),
        Bar(
            "deterministic D=128, geometric mean", STEADY, _cases((128,), **backward), (FAST, 0.85), (FAST, 0.95), True
        ),
        Bar("deterministic D=64, geometric mean", STEADY, _cases((64,), **backward), (FAST, 0.80), (FAST, 0.95), True),
        Bar("documents, of causal", FAST, _cases(masks=("documents",)), (ON_CAUSAL, 0.75), (ON_CAUSAL, 0.85)),
        Bar("carried state", CARRIED, _cases(lengths=(LOCAL,), **forward), (ONE_HOP, 0.97), (ONE_HOP, 1.00)),
    ]


def cells(kernels: Sequence[str]) -> list[Cell]:
    """The cells of all bars, each with everybody whom a bar names there; fp8 beside them where it exists."""
    found: dict[Case, list[Contender]] = {}
    for bar in table():
        for case in bar.cases:
            named = [bar.ours, *(side[0] for side in (bar.floor, bar.goal) if side)]
            found[case] = list(dict.fromkeys([*found.get(case, []), *named]))
    case = Case(128, 16384, "full", "forward")
    if FP8.kernel in kernels:
        found[case].append(FP8)
    # a peer first, so that its result is the one that the others are compared with
    order = ("cudnn", "fa4", "flex")
    return [
        Cell(case, tuple(sorted(names, key=lambda c: order.index(c.kernel) if c.kernel in order else len(order))))
        for case, names in found.items()
    ]


Rates = Callable[[Case, Contender], float | None]


def rates(rows: dict[tuple, dict]) -> Rates:
    """TFLOP/s of a contender in a case; None where it was not measured or failed."""

    def rate(case: Case, contender: Contender) -> float | None:
        key = (case.head_dim, case.length, case.mask, case.direction, case.kv_heads, *contender)
        return rows.get(key, {}).get("tflops")

    return rate


def _ratios(bar: Bar, side: tuple[Contender, float] | None, rate: Rates) -> list[float | None]:
    found: list[float | None] = []
    for case in bar.cases:
        mine, other = rate(case, bar.ours), rate(case, side[0]) if side else None
        found.append(mine / other if mine and other else None)
    return found


def _geometric(ratios: list[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return prod(known) ** (1 / len(known)) if len(known) == len(ratios) else None


def lines(rows: dict[tuple, dict]) -> Iterator[Line]:
    rate = rates(rows)
    for bar in table():
        floors, goals = _ratios(bar, bar.floor, rate), _ratios(bar, bar.goal, rate)
        if bar.together:
            yield Line(bar, f"{len(bar.cases)} cells", None, _geometric(floors), _geometric(goals))
            continue
        for case, floor, goal in zip(bar.cases, floors, goals, strict=True):
            where = f"D={case.head_dim} {case.mask} {case.direction} {case.length // 1024}k"
            yield Line(bar, where, rate(case, bar.ours), floor, goal)


HEAD = ["bar", "cell", "TFLOP/s", "floor", "measured", "met", "goal", "measured", "met"]


def _side(side: tuple[Contender, float] | None, ratio: float | None, met: bool | None) -> list[str]:
    if side is None:
        return ["", "", ""]
    said = {True: "yes", False: "NO", None: "not measured"}[met if ratio is not None else None]
    return [f"{side[0]} x {side[1]:.2f}", "" if ratio is None else f"{ratio:.3f}", said]


def as_row(line: Line) -> list[str]:
    """A line as the columns of HEAD."""
    tflops = "" if line.tflops is None else f"{line.tflops:.0f}"
    floor = _side(line.bar.floor, line.floor, line.floor_met)
    return [line.bar.name, line.where, tflops, *floor, *_side(line.bar.goal, line.goal, line.goal_met)]


def verdict(rows: dict[tuple, dict]) -> tuple[str, bool]:
    """The table as text, and whether every floor is met; a floor that was not measured is missed."""
    judged = list(lines(rows))
    text = [HEAD, *map(as_row, judged)]
    widths = [max(len(row[i]) for row in text) for i in range(len(HEAD))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]
    missed = [line for line in judged if not line.floor_met]
    goals = [line for line in judged if line.goal_met]
    out.append(f"{len(judged) - len(missed)} of {len(judged)} floors met, {len(goals)} goals met")
    return "\n".join(out), not missed
