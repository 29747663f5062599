"""The house's rules, read from the sources: imports flow one way, budgets are kept, tables and files have one name."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from launch import LAUNCHERS
from ringflash import KERNELS, LAYOUTS
from ringflash.arrangements import ARRANGEMENTS
from train.config import Launch, Parallel, Sequence, Source
from train.data.sources import FORMATS

REPO = Path(__file__).resolve().parent.parent
ROOMS = ("ringflash", "train", "launch")
FILES = sorted(path for room in ROOMS for path in (REPO / room).rglob("*.py"))
ALLOWED = {"ringflash": (), "train": ("ringflash",), "launch": ("train.config",)}
TENSORS = ("q", "k", "v", "out", "lse", "dout", "dlse", "delta", "dq", "dk", "dv")
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 40, 6

# (file, function) -> why it passes a budget; each is also an entry of docs/decisions.md
LONG_FUNCTIONS = {
    (
        "ringflash/kernels/triton/forward_kernel.py",
        "attend",
    ): "one kernel: its tiles live in registers from load to store",
}
MANY_PARAMETERS: dict[tuple[str, str], str] = {}
names = [str(path.relative_to(REPO)) for path in FILES]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules_imported(path: Path) -> set[str]:
    """Absolute names of what a file imports, relative imports resolved; `if TYPE_CHECKING` blocks included."""
    package = path.relative_to(REPO).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_flow_one_way(path):
    room = path.relative_to(REPO).parts[0]
    for module in modules_imported(path):
        if module.split(".")[0] in (*ROOMS, "tests", "configs", "benchmarks"):
            allowed = (room, *ALLOWED[room])
            assert any(f"{module}.".startswith(f"{name}.") for name in allowed), f"{path} looks upstream: {module}"


def lines_of_code(source: str) -> set[int]:
    """Lines that hold a token which is neither a comment, a docstring nor white space."""
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    docs = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, node.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - docs


@pytest.mark.parametrize("path", FILES, ids=names)
def test_every_file_and_function_keeps_its_budget(path):
    lines = lines_of_code(path.read_text())
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines: split it"
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        key = (str(path.relative_to(REPO)), node.name)
        body = [line for line in lines if node.body[0].lineno <= line <= node.end_lineno]
        assert len(body) <= MAX_FUNCTION_LINES or key in LONG_FUNCTIONS, f"{node.name} has {len(body)} lines"


def parameters(node: ast.FunctionDef) -> list[str]:
    """Positional parameters but tensors: what a caller has to remember the order of."""
    every = node.args.posonlyargs + node.args.args
    plain = [a.arg for a in every if not (a.annotation and "Tensor" in ast.unparse(a.annotation))]
    return [name for name in plain if name not in ("self", "cls", "ctx", *TENSORS)]


def is_kernel_or_op(node: ast.FunctionDef) -> bool:
    """Triton, Gluon and torch.library fix the form of these: flat arguments, by position."""
    return any(
        word in " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        for word in ("triton.jit", "gluon.jit", "_op", "register_fake")
    )


@pytest.mark.parametrize("path", FILES, ids=names)
def test_functions_take_few_parameters_by_position(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef) and not is_kernel_or_op(node):
            key = (str(path.relative_to(REPO)), node.name)
            assert len(parameters(node)) <= MAX_PARAMETERS or key in MANY_PARAMETERS, f"{node.name}{parameters(node)}"


def test_every_exception_is_still_needed_and_justified():
    decisions = (REPO / "docs" / "decisions.md").read_text()
    for file, function in (*LONG_FUNCTIONS, *MANY_PARAMETERS):
        nodes = [node for node in ast.walk(tree_of(REPO / file)) if getattr(node, "name", None) == function]
        assert len(nodes) == 1, f"{file}: no {function}: delete the exception"
        assert f"`{function}`" in decisions, f"docs/decisions.md says nothing about {function}"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_the_house_has_no_drawer(path):
    assert path.stem not in ("utils", "util", "common", "helpers", "helper", "misc")
    assert path.read_text().isascii(), "sources are ASCII"


def test_tables_and_files_have_one_name():
    for room, table in (("layouts", LAYOUTS), ("kernels", KERNELS)):
        folder = REPO / "ringflash" / room
        files = {path.stem for path in folder.iterdir() if path.name.strip("_") not in ("init__.py", "pycache")}
        assert set(table) <= files, f"{room}: an entry without its file"
        assert {name: module.__name__ for name, module in table.items()} == {
            name: f"ringflash.{room}.{name}" for name in table
        }


def test_the_words_of_a_table_are_those_of_its_key():
    """The config names them again, because it imports neither torch nor `launch`."""
    for section, key, table, others in (
        (Sequence, "layout", LAYOUTS, {"auto"}),
        (Parallel, "arrangement", ARRANGEMENTS, set()),
        (Launch, "scheduler", LAUNCHERS, set()),
        (Source, "format", FORMATS, set()),
    ):
        words = re.findall(r"'(\w+)'", str(section.model_fields[key].annotation))
        assert {*words} == {*table, *others}, f"{section.__name__}.{key}"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_every_module_says_what_lives_in_it(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body


@pytest.mark.parametrize("path", sorted((REPO / "ringflash").glob("*.py")), ids=lambda path: path.name)
def test_every_public_function_of_the_library_says_what_it_does(path):
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {names}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())
"""


def test_launch_imports_no_torch():
    code = BLOCK.format(names=("torch", "numpy", "transformers", "deepspeed", "triton", "wandb", "ringflash"))
    python(code + "import launch.__main__, launch.job, launch.torchrun, train.config")
    code = BLOCK.format(names=("torch", "numpy", "transformers", "deepspeed", "triton", "wandb"))
    python(code + "import ringflash; assert 'attention' in dir(ringflash)")


def test_ringflash_imports_and_computes_without_optional_packages():
    code = BLOCK.format(names=("triton", "transformers", "deepspeed", "wandb", "pydantic", "rich", "train", "launch"))
    python(
        code.replace(
            "sys.meta_path", "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\nsys.meta_path"
        )
        + "import torch, ringflash\n"
        "q = torch.randn(1, 8, 2, 16, requires_grad=True)\n"
        "ringflash.attention(q, q, q).sum().backward()\n"
        "ringflash.attention(q, q, q, layout=ringflash.Ring().layout(8)).sum().backward()\n"
        "assert 'triton' not in sys.modules"
    )


def test_nothing_happens_at_import():
    """No group, no thread, no CUDA context, no environment change."""
    python(
        "import os, threading, torch\n"
        "before = dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "import ringflash\n"
        "after = dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "assert before == after and not torch.cuda.is_initialized() and not torch.distributed.is_initialized()"
    )


def test_every_fault_of_the_mutants_can_still_be_planted():
    """Its text is there once, and the test that must see it exists."""
    from mutants import FAULTS

    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert (REPO / fault.file).read_text(encoding="utf-8").count(fault.old) == 1, fault
        file, test = fault.test.split("::")
        assert f"def {test.partition('[')[0]}(" in (REPO / file).read_text(encoding="utf-8"), fault


@pytest.mark.parametrize("path", FILES + sorted((REPO / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_runs_a_file_is_its_last_statement(path):
    """What comes behind is not there yet when the file is run, though all is well where it is imported."""
    *before, _ = tree_of(path).body or [None]
    assert not [one for one in before if isinstance(one, ast.If) and "__main__" in ast.unparse(one.test)]
