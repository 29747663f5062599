"""Documents show what the result files say, name files that exist, and their examples run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
from oracle import check, inputs, want

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_documents_are_rendered_from_the_result_files():
    done = subprocess.run(
        [sys.executable, ROOT / "docs/render.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def examples_of_the_readme() -> tuple[dict[str, torch.Tensor], list[tuple[str, int]], tuple[int, ...]]:
    """Body: results of the library's example on 64 tokens, its first calls of torch, the shape of the logits."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    library, hugging_face = blocks
    assert len(library.splitlines()) <= 10 and library.count("1_048_576") == 1
    calls: list[tuple[str, int]] = []
    dist, plain = torch.distributed, (torch.cuda.set_device, torch.distributed.init_process_group)
    torch.cuda.set_device = lambda device: calls.append(("set_device", device))
    dist.init_process_group = lambda: calls.append(("init_process_group", dist.get_world_size()))  # this world's, made
    try:
        device = torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")
        leaves = [x.to(device).requires_grad_() for x in inputs(64)[:3]]
        names = dict(zip("qkv", leaves, strict=True))
        exec(library.replace("1_048_576", "64"), names)
        from transformers import AutoModelForCausalLM, LlamaConfig

        names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "config": LlamaConfig(**training.LLAMA)}
        names["ids"] = torch.arange(64, device=device)[None]
        hugging_face, call = hugging_face.rstrip().rsplit("\n", 1)
        with device:
            exec(hugging_face, names)
            logits = eval(call, names).logits
    finally:
        torch.cuda.set_device, dist.init_process_group = plain
    layout = names["layout"]
    sums = [layout.unshard(layout.shard(x.grad)) for x in leaves]
    whole = (layout.unshard(names["out"].detach()), layout.unshard(names["lse"].detach(), 2), *sums)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (x.cpu() for x in whole), strict=True)), calls, logits.shape


def test_the_examples_of_the_readme_run_each_process_on_its_own_gpu(two):
    q, k, v, _, dlse = inputs(64)
    wanted = want(q, k, v, torch.ones_like(q), torch.zeros_like(dlse))
    for rank, (results, calls, logits) in enumerate(two(examples_of_the_readme)):
        check(results, wanted)
        assert calls == [("set_device", rank), ("init_process_group", 2)]
        assert logits == (1, 32, training.LLAMA["vocab_size"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_result_says_where_it_comes_from():
    for path in (ROOT / "docs/results").iterdir():
        text = path.read_text()
        rows = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        for row in rows:
            assert all(row[key] for key in ("command", "commit", "hardware", "date")), path.name


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """docs/render.py in a copy whose results are made up: few rows, of every kind."""
    tmp_path = tmp_path_factory.mktemp("measured")
    for name in ("docs", "benchmarks", "ringflash", "train"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    where = {"command": "python x.py", "commit": "abc", "hardware": "a card", "date": "2000-01-01"}
    case = {"head_dim": 128, "heads": 16, "kv_heads": 16, "batch": 1, "mask": "full", "direction": "forward"}
    speeds = [case | {"kernel": kernel, "form": "", "length": length, "tflops": 111.0 + length, "to_cudnn": 1.25}
              for kernel in ("gluon", "cudnn") for length in (4096, 8192)]  # fmt: skip
    speeds += [case | {"kernel": "fa4", "form": "", "length": 4096, "error": "not installed"}]
    shape = {"name": "GPT-2", "batch": 2, "length": 1024, "heads": 16, "head_dim": 64, "once_bytes": 10, "ms": 1.0}
    counted = [shape | {"method": method, "direction": direction, "bytes": size, "peak_bytes": size, "num_kernels": 1}
               for method, size in (("plain", 120), ("ours", 10)) for direction in ("forward", "backward")]  # fmt: skip
    counted += [row | {"name": "1k"} for row in counted]
    rank = {"ranks": 8, "local": 8192, "heads": 16, "kv_heads": 16, "mask": "documents", "layout": "balanced",
            "share": 0.975, "tflops": 512.0, "ms": 2.5, "predicted_ms": 2.25, "to_single": 0.925,
            "to_causal": 0.875}  # fmt: skip
    ranks = [rank | {"direction": direction} for direction in ("forward", "backward", "both")]
    files = {
        "ring_rank": ranks,
        "attention": speeds,
        "attention_bars": [row | {"rounds": 5} for row in speeds],
        "traffic": counted,
    }
    for name, rows in files.items():
        (tmp_path / f"docs/results/{name}.jsonl").write_text("".join(json.dumps(row | where) + "\n" for row in rows))
    return tmp_path


def render(root: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, root / "docs/render.py", *words], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def written(measured):
    """The copy, rendered; what a check said before."""
    stale = render(measured, "--check")
    assert render(measured).returncode == 0
    return measured, stale


def test_new_results_make_documents_and_pictures_stale_until_they_are_rendered(written):
    measured, stale = written
    assert stale.returncode == 1
    for name in ("README.md", "results.md", "traffic.md", "attention_d128.svg", "traffic.svg", "timeline.svg"):
        assert name in stale.stdout
    assert render(measured, "--check").returncode == 0
    readme, results = (measured / "README.md").read_text(), (measured / "docs/results.md").read_text()
    assert "docs/images/attention_d128.svg" in readme and "python x.py" in readme
    assert "| forward | 128 | full | 4207 (1.25) | 8303 (1.25) |" in readme
    assert "| 128 | 16:16 | full | forward | 4096 | 4207 | 4207 | - |" in results
    row = "| 8 | 8192 | 16:16 | balanced | 0.975 | 0.975 | 0.975 | 512 | 0.925 | 0.875 | 2.25 | 2.50 |"
    assert row in results and "at the 512 TFLOP/s of one rank on one GPU" in readme
    counted = (measured / "docs/traffic.md").read_text()
    assert "12.0 times fewer bytes" in counted and "Ours moves 1.00 to 1.00 times each tensor once" in counted


def test_a_picture_of_other_rows_is_stale_and_rendering_twice_changes_nothing(written, tmp_path):
    measured = shutil.copytree(written[0], tmp_path / "copy")
    picture, rows = measured / "docs/images/attention_d128.svg", measured / "docs/results/attention.jsonl"
    drawn = picture.read_text()
    assert render(measured).returncode == 0 and picture.read_text() == drawn
    rows.write_text(rows.read_text().replace("4207.0", "4208.0"))
    assert "attention_d128.svg" in render(measured, "--check").stdout
