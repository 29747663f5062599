"""Write the measured numbers of `docs/results/*.json` into the documents, between their markers.

    python docs/render.py            # rewrites README.md and docs/*.md in place
    python docs/render.py --check    # exit 1 if a document does not show what the files say

A marker is `<!-- render: NAME -->`, closed by `<!-- end -->`; NAME is a function of RENDER. The JSON files are written
by the command that measured: see their "command", "commit", "hardware" and "date".
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
MARKER = re.compile(r"(<!-- render: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(result: dict) -> str:
    """The line under a table: where its numbers come from."""
    return f"`{result['command']}`, commit {result['commit'][:12]}, {result['hardware']}, {result['date']}."


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gpu() -> str:
    """Largest errors of the triton kernel on a GPU, by dtype."""
    result = load("gpu_tests")
    worst: dict[str, dict[str, float]] = {}
    for test in result["tests"]:
        dtype = re.search(r"torch\.(float32|bfloat16|float16)\]", test["test"])
        if dtype and "errors" in test and "[triton" in test["test"]:
            row = worst.setdefault(dtype[1], {})
            for name, error in test["errors"].items():
                row[name] = max(row.get(name, 0.0), error)
    names = ["out", "lse", "dq", "dk", "dv"]
    rows = [[dtype, *(f"{worst[dtype][name]:.1e}" for name in names)] for dtype in sorted(worst, reverse=True)]
    ratios = [max(t["rms_ratio_8_to_1"].values()) for t in result["tests"] if "rms_ratio_8_to_1" in t]
    return (
        f"On a GPU: {result['passed']} tests passed, {result['failed']} failed. Largest error of the Triton kernels\n"
        "against the fp64 reference, relative to the largest value, over all masks and head dimensions:\n\n"
        + table(["", *names], rows)
        + f"\nRms error of a ring of 8 over that of one rank, bf16, largest of 3 seeds: {max(ratios):.3f}.\n"
        + f"{source(result)}\n"
    )


def offsets() -> str:
    """The tests beyond 2^32 elements, and the same with 32-bit offsets."""
    result, mutant = load("gpu_large"), load("gpu_offsets_32bit")
    rows = []
    for test in result["tests"]:
        if "offsets" not in test["test"]:
            continue
        broken = next((t for t in mutant["tests"] if t["test"] == test["test"]), {"outcome": "not run"})
        name = test["test"].split("::test_")[1]
        errors = ", ".join(f"{key} {value:.1e}" for key, value in test.get("errors", {}).items())
        rows.append([name, test["outcome"], errors, broken["outcome"]])
    head = ["test", "outcome", "errors of first, middle and last rows", "with 32-bit offsets"]
    return table(head, rows) + f"\n{source(result)}\n"


def offline() -> str:
    """What the compiler makes of each kernel, for cards that are not here."""
    result = load("offline")
    head = ["arch", "kernel", "D", "dtype", "registers", "spill bytes", "shared bytes", "limit"]
    rows = [[str(row[key]) for key in ("arch", "direction", "d", "dtype", "registers", "spill_bytes", "shared_bytes",
             "shared_limit_bytes")] for row in result["rows"]]  # fmt: skip
    return table(head, rows) + f"\n{source(result)}\n"


def speed() -> str:
    """Forward and backward beside cuDNN, interleaved in one run."""
    result = load("attention_quick")
    head = ["D", "mask", "direction", "kernel", "TFLOP/s, median [min - max]", "of cuDNN"]
    rows = [
        [str(row["head_dim"]), row["mask"], row["direction"], row["kernel"],
         f"{row['tflops']:.0f} [{row['min']:.0f} - {row['max']:.0f}]", f"{row['to_cudnn']:.3f}"]
        for row in result["rows"]
    ]  # fmt: skip
    return table(head, rows) + f"\n16 heads, 16k tokens, bf16; {result['note']}. {source(result)}\n"


def demo() -> str:
    """What `make demo` printed."""
    result = load("demo")
    return "```\n" + result["report"].strip() + f"\n```\n\n{source(result)}\n"


RENDER: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "offsets": offsets,
    "offline": offline,
    "speed": speed,
    "demo": demo,
}


def rendered(text: str) -> str:
    return MARKER.sub(lambda found: found[1] + RENDER[found[2]]() + found[3], text)


def main() -> int:
    stale = []
    for path in [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]:
        old = path.read_text()
        new = rendered(old)
        if new != old:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(f"{'stale' if '--check' in sys.argv else 'rewritten'}: {', '.join(stale) or 'none'}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
