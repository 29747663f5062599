"""Write the measured numbers of `docs/results` into the documents, between their markers, and draw the pictures.

    python docs/render.py            # rewrites README.md and docs/*.md in place
    python docs/render.py --check    # exit 1 if a document does not show what the files say

A marker is `<!-- render: NAME -->`, closed by `<!-- end -->`; NAME is a function of RENDER. The result files are
written by the command that measured: see their "command", "commit", "hardware" and "date", which in a file of JSON
lines every row has.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pictures
import training

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
BENCHMARKS = DOCS.parent / "benchmarks"
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
    result, newer = load("gpu_tests"), load("gpu_gluon")
    worst: dict[str, dict[str, float]] = {}
    for test in result["tests"]:
        dtype = re.search(r"torch\.(float32|bfloat16|float16)\]", test["test"])
        if dtype and "errors" in test and "[triton" in test["test"]:
            row = worst.setdefault(dtype[1], {})
            for name, error in test["errors"].items():
                row[name] = max(row.get(name, 0.0), error)
    names = ["out", "lse", "dq", "dk", "dv"]
    rows = [[dtype, *(f"{worst[dtype][name]:.1e}" for name in names)] for dtype in sorted(worst, reverse=True)]
    ratios: dict[str, float] = {}
    for test in result["tests"]:
        if "rms_ratio_8_to_1" in test:
            kernel = test["test"].split("[")[1].split("-")[0]
            ratios[kernel] = max(ratios.get(kernel, 0.0), *test["rms_ratio_8_to_1"].values())
    grown = ", ".join(f"{kernel} {ratio:.3f}" for kernel, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    return (
        f"On a GPU: {result['passed']} tests passed, {result['failed']} failed. Largest error of the Triton kernels\n"
        "against the fp64 reference, relative to the largest value, over all masks and head dimensions:\n\n"
        + table(["", *names], rows)
        + f"\nRms error of a ring of 8 over that of one rank, bf16, largest of 3 seeds: {grown}.\n"
        + f"{source(result)}\n\n"
        + f"The Gluon kernels since: {newer['passed']} tests passed, {newer['failed']} failed. {source(newer)}\n"
    )


def fp8() -> str:
    """Errors of the fp8 kernel and of the bf16 one against fp64, for several kinds of input."""
    result, names = load("fp8"), ("out", "dq", "dk", "dv", "lse")
    rows = []
    for test in result["tests"]:
        if found := re.search(r"test_error_beside_bf16\[(.*)-(full|causal)\]", test["test"]):
            errors = test["errors"]
            pairs = (f"{errors['gluon_fp8'][name]:.1e} ({errors['gluon'][name]:.1e})" for name in names)
            rows.append([*found.groups(), *pairs])
    counts = f"{result['passed']} tests passed, {result['failed']} failed."
    return table(["input", "mask", *names], rows) + f"\n{counts} {source(result)}\n"


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


def rows_of(name: str) -> list[dict]:
    """The rows of a result file of JSON lines; none where it has not been measured yet."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def sources(rows: list[dict]) -> str:
    """`source` for rows that may come from several runs."""
    return " ".join(dict.fromkeys(map(source, rows)))


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n</details>"


def unmeasured(command: str) -> str:
    return f"Not measured yet: `{command}`.\n"


def bars() -> str:
    """The bars of the kernels and what was measured for them."""
    sys.path.insert(0, str(BENCHMARKS))
    import bars as judge
    from cases import identity

    rows = rows_of("attention_bars")
    if not rows:
        return unmeasured("python benchmarks/attention.py --bars")
    judged = [judge.as_row(line) for line in judge.lines({identity(row): row for row in rows})]
    runs = {f"{row['rounds']} interleaved rounds" for row in rows if "rounds" in row}
    return table(judge.HEAD, judged) + f"\nMedians of {', '.join(sorted(runs))}, bf16. {sources(rows)}\n"


def of_case(row: dict) -> tuple:
    """What a line of the table of speeds is about."""
    return row["head_dim"], f"{row['heads']}:{row['kv_heads']}", row["mask"], row["direction"], row["length"]


def speeds() -> str:
    """TFLOP/s of every contender in every case, behind the pictures."""
    rows = rows_of("attention")
    if not rows:
        return unmeasured("python benchmarks/attention.py")
    names = {(row["kernel"], row["form"]): " ".join((row["kernel"], row["form"])).strip() for row in rows}
    cases: dict[tuple, dict[tuple, str]] = {}
    for row in rows:
        rate = f"{row['tflops']:.0f}" if "tflops" in row else "-"
        cases.setdefault(of_case(row), {})[row["kernel"], row["form"]] = rate
    lines = [[*map(str, case), *(rates.get(name, "") for name in names)] for case, rates in cases.items()]
    head = ["D", "heads", "mask", "direction", "tokens", *names.values()]
    shown = [f"![{path.stem}](images/{path.name})" for path, _, _ in made() if path.stem.startswith("attention")]
    note = "-: refused, or failed; the row in the file says why."
    return "\n\n".join([*shown, folded("Every number", table(head, lines)), f"{note} {sources(rows)}"]) + "\n"


def speed() -> str:
    """The table and, once it is measured, the picture of the README."""
    rows = [
        row for row in rows_of("attention_bars") if row["kernel"] == "gluon" and not row["form"] and row.get("to_cudnn")
    ]
    if not rows:
        return unmeasured("python benchmarks/attention.py --bars")
    lengths = sorted({row["length"] for row in rows})
    cells: dict[tuple, dict[int, str]] = {}
    for row in rows:
        case = row["direction"], row["head_dim"], row["mask"]
        cells.setdefault(case, {})[row["length"]] = f"{row['tflops']:.0f} ({row['to_cudnn']:.2f})"
    lines = [[*map(str, case), *(found.get(length, "") for length in lengths)] for case, found in sorted(cells.items())]
    head = ["direction", "D", "mask", *(f"{length // 1024}k" for length in lengths)]
    by_length = [row for row in rows_of("attention") if row["head_dim"] == 128 and row["heads"] == row["kv_heads"]]
    words = "TFLOP/s by length of ringflash and its peers"
    picture = f"\n![{words}](docs/images/attention_d128.svg)\n\n{sources(by_length)}\n" if by_length else ""
    return f"{table(head, lines)}\n{sources(rows)}\n{picture}"


def traffic() -> str:
    """Bytes, times and peak memory beside plain attention."""
    rows = rows_of("traffic")
    if not rows:
        return unmeasured("python benchmarks/traffic.py")
    head = ["shape", "batch", "attention", "direction", "GB a sequence", "of each tensor once", "ms", "peak GB"]
    lines = []
    for row in rows:
        case = [row["name"], str(row["batch"]), row["method"], row["direction"]]
        if "error" in row:
            lines.append([*case, row["error"], "", "", ""])
            continue
        gigabytes, peak = (row[name] / row["batch"] / 1e9 for name in ("bytes", "peak_bytes"))
        lines.append([*case, f"{gigabytes:.3f}", f"{row['bytes'] / row['once_bytes']:.2f}", f"{row['ms']:.2f}",
                      f"{peak:.3f}"])  # fmt: skip
    picture = "![Bytes and peak memory by length](images/traffic.svg)"
    return f"{picture}\n\n{table(head, lines)}\n{linear(rows)}\n{gpt2(rows)}\n\n{sources(rows)}\n"


def travel() -> str:
    """Bytes that a rank of a ring sends, beside those of whole blocks."""
    head = ["ranks", "mask", "layout", "heads", "hops", "forward GB", "backward GB", "travels back", "whole blocks GB",
            "all at once GB"]  # fmt: skip
    rows = rows_of("travel")
    gathered = {key_of(row): row for row in rows if row["arrangement"] == "gather"}
    lines = []
    for row in rows:
        if row["arrangement"] != "ring":
            continue
        once = gathered[key_of(row)]
        both = [
            (row["whole_forward_bytes"], row["whole_backward_bytes"]),
            (once["forward_bytes"], once["backward_bytes"]),
        ]
        pairs = [f"{there / 1e9:.3f} + {back / 1e9:.3f}" for there, back in both]
        lines.append([str(row["ranks"]), row["mask"], row["layout"], f"{row['heads']} / {row['groups']}",
                      str(row["hops"]), f"{row['forward_bytes'] / 1e9:.3f}", f"{row['backward_bytes'] / 1e9:.3f}",
                      row["rotates"], *pairs])  # fmt: skip
    return f"{table(head, lines)}\n{sources(rows)}\n"


def key_of(row: dict) -> tuple:
    return tuple(row[name] for name in ("ranks", "mask", "layout", "heads", "groups"))


def linear(rows: list[dict]) -> str:
    """How far our bytes are above each tensor once, forward and backward together, and over which lengths."""
    long = [row for row in rows if row["method"] == "ours" and row["name"] != "GPT-2" and "bytes" in row]
    names = list(dict.fromkeys(row["name"] for row in long))
    ratios = []
    for name in names:
        mine = [row for row in long if row["name"] == name]
        ratios.append(sum(row["bytes"] for row in mine) / sum(row["once_bytes"] for row in mine))
    return (
        f"Ours moves {min(ratios):.2f} to {max(ratios):.2f} times each tensor once, forward and backward together, "
        f"from {names[0]} to {names[-1]} tokens."
    )


def gpt2(rows: list[dict]) -> str:
    """Plain over ours at the shape of FlashAttention's own table."""
    found: dict[str, list[float]] = {}
    for method in ("plain", "ours"):
        mine = [row for row in rows if row["name"] == "GPT-2" and row["method"] == method]
        found[method] = [sum(row[name] for row in mine) for name in ("bytes", "ms")]
    fewer, faster = (plain / ours for plain, ours in zip(found["plain"], found["ours"], strict=True))
    return f"At GPT-2's shape, forward and backward: {fewer:.1f} times fewer bytes, {faster:.1f} times less time."


def ring_rank() -> str:
    """What one rank of a ring reaches, beside one launch."""
    rows = rows_of("ring_rank")
    if not rows:
        return unmeasured("python benchmarks/ring_rank.py --bars")
    head = ["P", "L", "heads", "layout", "forward", "backward", "both", "TFLOP/s", "of one device", "of causal",
            "predicted ms", "ms"]  # fmt: skip
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        way = row.get("arrangement", "ring")
        layout = row["layout"] if way == "ring" else f"{row['layout']}, {way}"
        case = (row["ranks"], row["local"], f"{row['heads']}:{row['kv_heads']}", layout)
        cases.setdefault(case, {})[row["direction"]] = row
    lines = []
    for case, ways in cases.items():
        both = ways.get("both", {})
        shares = [f"{ways[way]['share']:.3f}" if way in ways else "" for way in ("forward", "backward", "both")]
        ratios = [f"{both[name]:.3f}" if name in both else "" for name in ("to_single", "to_causal")]
        rate, predicted, ms = (f"{both[n]:.{d}f}" if both.get(n) is not None else ""
                               for n, d in (("tflops", 0), ("predicted_ms", 2), ("ms", 2)))  # fmt: skip
        lines.append([*map(str, case), *shares, rate, *ratios, predicted, ms])
    return table(head, lines) + f"\n{sources(rows)}\n"


def ring() -> str:
    """A ring over the GPUs of a host, beside one GPU."""
    rows = rows_of("ring")
    if not rows:
        return unmeasured("torchrun --nproc-per-node 2 benchmarks/ring.py")
    cases: dict[tuple, dict[tuple, dict]] = {}
    for row in rows:
        case = (row["ranks"], row["length"], row["heads"], row["kv_heads"])
        cases.setdefault(case, {})[row["contender"], row.get("way", "both")] = row
    peers = list(dict.fromkeys(row["contender"] for row in rows if row["contender"] not in ("ring", "alone")))
    lines = []
    for (ranks, length, heads, kv_heads), found in cases.items():
        line = [str(ranks), f"{length // 1024}k", f"{heads}:{kv_heads}"]
        for way in ("forward", "both"):
            ours, one, *theirs = (found.get((name, way), {}).get("tflops") for name in ("ring", "alone", *peers))
            line += ["" if rate is None else f"{rate:.0f}" for rate in (ours, one)]
            line += ["" if not (ours and one) else f"{ours / one:.3f}"]
            line += ["" if rate is None else f"{rate:.0f}" for rate in theirs]
        lines.append(line)
    names = ("ring", "one GPU", "share", *peers)
    head = ["GPUs", "tokens", "heads", *(f"{name}, {way}" for way in ("forward", "both") for name in names)]
    return table(head, lines) + f"\n{sources(rows)}\n"


def multigpu() -> str:
    """Tests that need several GPUs, and what they noted."""
    rows = rows_of("multigpu")
    lines = [
        [f"`{row['command'].split('multigpu ')[1]}`", row["commit"], *(str(row[n]) for n in ("passed", "failed"))]
        for row in rows
    ]
    worst = next(row["largest_errors"] for row in rows if "largest_errors" in row)
    errors = "; ".join(
        f"{dtype} {', '.join(f'{name} {error:.1e}' for name, error in found.items())}" for dtype, found in worst.items()
    )
    demo = next(row["errors"] for row in rows if "errors" in row)
    killed = next(row["ended_s"] for row in rows if "ended_s" in row)
    means = " and ".join(f"{mean:.3f}" for mean in demo["mean of the last 20"])
    return (
        table(["pytest -m multigpu", "commit", "passed", "failed"], lines)
        + f"\nLargest errors of the ring against the fp64 reference: {errors}.\nThe demo on all GPUs and on one, fp32: "
        f"first 20 losses within {demo['first 20']:.1e}, means of the last 20 of 200 {means}.\n"
        f"A job whose rank was killed in mid-step ended {killed} s later.\n\n"
        f"{rows[0]['hardware']}, {rows[0]['date']}.\n"
    )


def mesh_step() -> str:
    """Steps of the trainer over several GPUs, measured beside predicted."""
    sys.path.insert(0, str(BENCHMARKS))
    import meshes

    rows = rows_of("mesh_step")
    lines = []
    for row in rows:
        case = meshes.CASES[row["case"]]
        share = row["attention_share"] if case.documents else None
        said = meshes.predicted(case.config(row["ranks"], tiny=False), row["ranks"], share)
        pairs = [(row["peak_bytes"] / 1e9, said["predicted_peak_bytes"] / 1e9),
                 (row["seconds"], said["predicted_seconds"])]  # fmt: skip
        lines.append(
            [row["case"], str(row["layers"]), f"{row['length']:,}", f"{row['tokens_per_s_per_gpu']:,.0f}",
             f"{row['mfu']:.3f}", f"{(row['attention_forward_s'] + row['attention_backward_s']) / row['seconds']:.2f}",
             *(word for got, guess in pairs for word in (f"{got:.1f}", f"{guess:.1f} ({guess / got - 1:+.0%})"))]
        )  # fmt: skip
    head = ["case", "layers", "tokens", "tokens/s a GPU", "causal MFU", "attention's share of the time", "peak, GB",
            "predicted", "seconds", "predicted"]  # fmt: skip
    return table(head, lines) + f"\n{sources(rows)}\n"


def train_step() -> str:
    """Training steps of one GPU."""
    rows = rows_of("train_step")
    if not rows:
        return unmeasured("python benchmarks/train_step.py")
    return table(training.STEPS, training.all_steps(rows)) + f"\n{sources(rows)}\n"


def predicted() -> str:
    """Memory and seconds of each measured step beside what is predicted of it now."""
    return table(training.steps.AGAINST, training.steps.against(RESULTS / "train_step.jsonl"))


def switches() -> str:
    """What each switch of [memory] saves and costs."""
    found = training.switched(rows_of("train_step"))
    if found is None:
        return unmeasured("python benchmarks/train_step.py")
    return beside("switch", *found)


def beside(what: str, plain: dict, lines: list[list[str]]) -> str:
    """A table of what is saved and costs, under the step that all is compared with."""
    return (
        f"{training.steps.shape_of(plain)}, {plain['layers']} layers, {plain['length']:,} tokens, beside the step "
        f"without switches ({plain['peak_allocated_bytes'] / 1e9:.1f} GB, {plain['seconds']:.2f} s):\n\n"
        + table([what, *training.SWITCHES], lines)
    )


def away() -> str:
    """What an optimizer in host memory saves and costs."""
    found = training.away(rows_of("train_step"))
    if found is None:
        return unmeasured("python benchmarks/train_step.py --optimizer adamw --zero 2 --offload optimizer")
    return beside("switch", *found)


def window() -> str:
    """Seconds and memory of steps that differ in their window alone."""
    pairs = list(training.windows(rows_of("train_step")))
    if not pairs:
        return unmeasured("python benchmarks/train_step.py --window 4096")
    text = ""
    for pair in pairs:
        without, within = (f"{row['seconds']:.2f} s, peak {row['peak_allocated_bytes'] / 1e9:.3f} GB" for row in pair)
        text += (
            f"{pair[0]['shape']}, {pair[0]['layers']} layers, {pair[0]['length']:,} tokens: {without}; "
            f"with a window of {pair[1]['window']:,} {within}.\n\n{sources(list(pair))}\n"
        )
    return text


def head() -> str:
    """The loss of the head, ours and Liger's."""
    rows = rows_of("head")
    if not rows:
        return unmeasured("python benchmarks/head.py")
    lines = [
        [row["head"], f"{row['tokens']:,}", str(row["width"]), f"{row['vocabulary']:,}", f"{row['seconds']:.3f}",
         f"{row['peak_bytes'] / 1e9:.2f}", f"{row['error_hidden']:.1e}", f"{row['error_weight']:.1e}"]
        for row in rows
    ]  # fmt: skip
    names = ["whose", "tokens", "width", "vocabulary", "seconds", "adds at its peak, GB", "error of dhidden",
             "of dweight"]  # fmt: skip
    return table(names, lines) + f"\n{sources(rows)}\n"


def million() -> str:
    """Where the time of the longest step goes."""
    row = training.longest_step(rows_of("train_step"))
    if row is None:
        return unmeasured("python benchmarks/train_step.py --profile")
    settled = row["seconds"] - training.steps.first_call(row)
    attention, dense, whole = training.ceilings(row)
    layers = training.steps.SHAPES[row["shape"]]["num_hidden_layers"]
    return (
        f"{row['shape']}, {row['layers']} layers, {row['length']:,} tokens: {row['seconds']:.1f} s, causal MFU "
        f"{row['mfu_causal']:.1%}; without what the first call of attention took more than the others "
        f"{settled:.1f} s, {row['mfu_causal'] * row['seconds'] / settled:.1%}.\n\n"
        + table(training.PARTS, list(training.parts(row)))
        + f"\nMFU counts what a model needs: attention at 3 forwards where its kernels do 3.5, layers without their "
        f"recomputation. So attention alone has {attention:.1%}, matrix products alone {dense:.1%}; the rest comes "
        f"on top of both.\nWith all {layers} layers, where the output head counts less, {whole:.1%} are predicted.\n\n"
        f"{source(row)}\n"
    )


def longest() -> str:
    """The longest sequences that train, by set of switches."""
    lines = training.longest(rows_of("largest"))
    note = "" if rows_of("largest") else "Not measured yet.\n\n"
    found, length = sources(rows_of("largest")), 3 * 2**19
    beyond = "".join(f"- {line}\n" for line in training.needed(length))
    return (
        f"{note}{table(training.LONGEST, lines)}\n{found or f'`{training.LARGEST}`'}\n\n"
        f"What {length:,} tokens would take, predicted:\n\n{beyond}"
    )


def million_steps() -> str:
    """The longest step and the share of a ring, in two sentences."""
    rows = rows_of("train_step")
    row, ranks = training.longest_step(rows), [row for row in rows if row.get("ring", 1) > 1]
    if row is None or not ranks:
        return unmeasured("python benchmarks/train_step.py")
    device, host = (row[name] / 1e9 for name in ("peak_allocated_bytes", "host_peak_bytes"))
    rank, tried = ranks[0], [row for row in rows_of("largest") if "tried" not in row]
    whole = max(tried, key=lambda row: row["length"])
    return (
        f"One H200 trains {row['layers']} layers of {row['shape']} on {row['length']:,} tokens with full causal "
        f"attention in {row['seconds']:.0f} s a step, {row['mfu_causal']:.1%} causal MFU, with {device:.0f} GB of its "
        f"memory and {host:.0f} GB of the host's.\nAll {whole['layers']} layers have made a step of "
        f"{whole['length']:,} tokens (window {whole['window']:,}, no optimizer) with "
        f"{whole['host_peak_bytes'] / 1e9:.0f} GB of host memory.\nOne rank's part of a ring of {rank['ring']} on "
        f"{rank['length']:,} tokens, alone on one GPU, makes {rank['ring_seconds_all_hidden']:.0f} s a step of "
        f"{rank['shape']}, no message counted;\nthe published step of 8 H100 takes "
        f"{training.PUBLISHED_S} s.\n\n{sources([row, whole, rank])}\n"
    )


def share() -> str:
    """One rank's part of a ring's step beside the published one."""
    rows = [row for row in rows_of("train_step") if row.get("ring", 1) > 1]
    if not rows:
        return unmeasured("python benchmarks/train_step.py --ring 8 --ring-rank 4")
    row = rows[0]
    about = f"{row['shape']}, {row['length']:,} tokens over {row['ring']} ranks, one rank alone on one GPU:\n\n"
    return about + table(*training.share(rows)) + f"\n{sources(rows)}\n"


def data_wait() -> str:
    """What a step waits for its data."""
    rows = rows_of("data_wait")
    head = ["GPUs", "shape", "layers", "tokens", "data", "step, s", "wait, ms", "share", "largest share"]
    lines = [
        [
            str(row["processes"]), row["shape"], str(row["layers"]), f"{row['length']:,}", row["kind"],
            f"{row['step_s']:.2f}", f"{1e3 * row['data_wait_s']:.3f}",
            *(f"{100 * row[name]:.4f}%" for name in ("data_wait_share", "data_wait_share_largest")),
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines) + f"\n{sources(rows)}\n"


def saves() -> str:
    """What a step waits for a save."""
    rows = rows_of("checkpoint")
    times = ("first_stall_s", "stall_s", "copy_s", "blocking_save_s", "step_s", "step_beside_writing_s", "load_s")
    lines = [
        [str(row["processes"]), str(row["zero"]), f"{row['files_bytes'] / 1e9:.2f}", *(f"{row[t]:.3f}" for t in times)]
        for row in rows
    ]
    head = ["GPUs", "ZeRO", "GB", "first save", "save", "copy alone", "blocking save", "step",
            "step beside writing", "load"]  # fmt: skip
    return table(head, lines) + f"\n{sources(rows)}\n"


def trainer_gpu() -> str:
    """Tests of the trainer that need one GPU."""
    result = load("trainer_gpu")
    tests = {test["test"].split("::test_")[1]: test for test in result["tests"]}
    loss = next(test["bytes_above_gradients"] for name, test in tests.items() if name.startswith("R106"))
    held = ", ".join(f"{size / 1e9:.2f} GB at {int(tokens):,} tokens" for tokens, size in loss.items())
    return (
        f"{result['passed']} passed, {result['failed']} failed: {', '.join(f'`{name}`' for name in tests)}.\n"
        f"The loss holds, beside its gradients, {held}.\n{source(result)}\n"
    )


def planning() -> str:
    """How long the balanced layout of a batch takes, and how even it is."""
    rows = rows_of("planning")
    if not rows:
        return unmeasured("python benchmarks/planning.py")
    fields = ("kind", "documents", "tokens", "ranks", "ms", "cpu_ms", "fastest_ms", "segments", "makespan")
    lines = [
        [f"{row[name]:,}" if name in ("documents", "tokens") else str(row[name]) for name in fields] for row in rows
    ]
    return table(list(fields), lines) + f"\n{sources(rows)}\n"


def timeline() -> str:
    """The picture of one ring."""
    (row,) = timeline_rows()
    time = (
        f"at the {row['tflops']:.0f} TFLOP/s of one rank on one GPU" if row["tflops"] else "in pairs of query and key"
    )
    even = row["makespan"]
    return (
        "![Each rank's hops in time](docs/images/timeline.svg)\n\n"
        f"A ring of {row['ranks']} with {row['documents']} packed documents in {row['tokens']:,} tokens, forward: the "
        f"hops of each rank, simulated from the pairs of each, {time}.\nMakespan over the ideal: "
        f"{even['balanced']:.3f} in layout balanced, {even['zigzag']:.3f} in zigzag.\n"
    )


@functools.cache
def timeline_rows() -> list[dict]:
    """What the picture shows: the begin and end of each rank's hops, simulated, in ms where a rate is measured."""
    sys.path[:0] = [str(BENCHMARKS), str(DOCS.parent)]
    import numpy as np
    from cases import documents

    from ringflash import LAYOUTS, makespan, mask
    from ringflash.layouts.documents import Documents

    size, tokens, heads, width = 8, 65536, 16, 128
    borders = np.array(documents(tokens))
    lo, hi = mask.intervals(tokens, tokens, causal=True, cu_seqlens=borders.astype(np.int32))
    wanted = {"ranks": size, "local": tokens // size, "kv_heads": heads, "mask": "documents", "direction": "forward"}
    rows = [row for row in rows_of("ring_rank") if row.get("arrangement", "ring") == "ring"]
    rates = [row["tflops"] for row in rows if wanted.items() <= row.items()]
    scale = 4 * width * heads / rates[-1] / 1e9 if rates else 1e-6  # ms a pair, or millions of pairs
    hops, even = {}, {}
    for name in ("balanced", "zigzag"):
        work = makespan.pairs(LAYOUTS[name].segments(tokens, size, 1, Documents(borders, True)), lo, hi)
        start, end = (x.round(4).tolist() for x in makespan.simulate(work * scale))
        hops[name], even[name] = [start, end], round(makespan.ratio(work), 4)
    return [{"ranks": size, "tokens": tokens, "documents": len(borders) - 1, "tflops": rates[-1] if rates else None,
             "hops": hops, "makespan": even}]  # fmt: skip


def tuning() -> str:
    """What each candidate tiling reached."""
    rows = rows_of("tuning")
    if not rows:
        return unmeasured("python benchmarks/tune.py")
    fields = ("kernel", "head_dim", "block_q", "block_k", "num_warps", "num_stages", "tflops")
    lines = [[*(str(row[name]) for name in fields), "yes" if row["best"] else ""] for row in rows]
    return table([*fields, "kept"], lines) + f"\n{sources(rows)}\n"


def demo() -> str:
    """What `make demo` printed."""
    result = load("demo")
    return "```\n" + result["report"].strip() + f"\n```\n\n{source(result)}\n"


def evaluation() -> str:
    """What `ringflash eval` printed of the demo's checkpoint."""
    result = load("evaluation")
    return f"```\n$ {result['command']}\n{result['report'].strip()}\n```\n\n{source(result)}\n"


RENDER: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "fp8": fp8,
    "offsets": offsets,
    "offline": offline,
    "bars": bars,
    "speed": speed,
    "speeds": speeds,
    "traffic": traffic,
    "travel": travel,
    "ring_rank": ring_rank,
    "ring": ring,
    "multigpu": multigpu,
    "mesh_step": mesh_step,
    "train_step": train_step,
    "predicted": predicted,
    "switches": switches,
    "away": away,
    "window": window,
    "head": head,
    "million": million,
    "million_steps": million_steps,
    "longest": longest,
    "share": share,
    "data_wait": data_wait,
    "saves": saves,
    "trainer_gpu": trainer_gpu,
    "planning": planning,
    "timeline": timeline,
    "tuning": tuning,
    "demo": demo,
    "evaluation": evaluation,
}


def rendered(text: str) -> str:
    return MARKER.sub(lambda found: found[1] + RENDER[found[2]]() + found[3], text)


def made() -> list:
    """(file, rows, how it is drawn) of every picture."""
    return list(pictures.pictures(rows_of("attention"), rows_of("traffic"), timeline_rows()))


def main() -> int:
    check = "--check" in sys.argv
    stale = [path.name for path, rows, _ in made() if pictures.shown(path) != pictures.digest(rows)]
    if not check:
        for path, rows, draw in made():
            draw(rows, path)
    for path in [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]:
        old = path.read_text()
        new = rendered(old)
        if new != old:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    print(f"{'stale' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
