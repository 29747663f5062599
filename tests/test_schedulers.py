"""launch/ under slurm and Kubernetes: the texts they get, what the tools say of them, and what each node does."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models as kubeflow

import launch
from launch.__main__ import launch as launch_command
from launch.environment import settings
from launch.job import Job
from train.config import Checkpoint, load
from train.config.rules import SLURM_KEYS, VARIABLE_KEYS

REPO = Path(__file__).resolve().parent.parent
GOLDEN = REPO / "tests" / "golden"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
PYTHON = "/opt/venv/bin/python"
SET = ["--set", "train.steps=20", "--set", "data.pattern='$(date)$$'"]
SUFFIX = {"slurm": "sh", "kubernetes": "yaml"}


@pytest.fixture(autouse=True)
def a_clean_shell(monkeypatch):
    """No variable that the launcher would pass on; the folder of the golden texts; a python of a fixed name."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setattr(sys, "executable", PYTHON)


def dry_run(scheduler: str, capsys, *overrides: str) -> str:
    arguments = [part for override in overrides for part in ("--set", override)]
    assert launch_command(["run.toml", "--scheduler", scheduler, "--dry-run", *SET, *arguments]) == 0
    return capsys.readouterr().out


def job(scheduler: str, *overrides: str) -> Job:
    return Job(load("run.toml", [f"launch.scheduler={scheduler}", *overrides]), "train", ("run.toml",))


@pytest.mark.parametrize("scheduler", SUFFIX)
def test_a_dry_run_prints_exactly_what_would_be_submitted(scheduler, capsys):
    """After a change that is meant: `pytest` shows the new text; put it into the golden file."""
    assert dry_run(scheduler, capsys) == (GOLDEN / f"{scheduler}.{SUFFIX[scheduler]}").read_text()


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("quoting", ["train.name=plain", 'data.path=/a "b" $c `d` \\e'])
def test_the_batch_script_is_sound_for_bash_and_shellcheck(nodes, quoting, capsys):
    mesh = "parallel.ring=8"
    script = dry_run("slurm", capsys, f"launch.nodes={nodes}", mesh, quoting)
    for command in (["bash", "-n"], [SHELLCHECK, "--severity=info", "-"]):
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    options = re.findall(r"^#SBATCH (.*)$", script, flags=re.MULTILINE)
    first_command = next(line for line in script.splitlines() if not line.startswith("#"))
    assert script.index(f"#SBATCH {options[-1]}") < script.index(first_command)  # sbatch reads no further
    assert options[-3:] == ["--partition=gpu", "--time=7-00:00:00", "--mem=0"]


def objects(text: str) -> tuple[dict, dict]:
    config_map, train_job = yaml.safe_load_all(text)
    return config_map, train_job


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_train_job_is_one_of_kubeflow(nodes, capsys):
    """Kubeflow's own models drop keys that they do not know and refuse wrong types: nothing may change on the way."""
    config_map, train_job = objects(dry_run("kubernetes", capsys, f"launch.nodes={nodes}", "parallel.ring=8"))
    assert kubeflow.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
    meta = kubeflow.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(config_map["metadata"])
    assert meta.name == meta.name.lower() and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", meta.name)
    assert config_map["data"] == {"run.toml": (GOLDEN / "run.toml").read_text()}
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, 8)
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert not reserved & {variable["name"] for variable in trainer["env"]}  # Kubeflow refuses a job that sets them


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def said_by_nodes(folder: Path, script: str, environment: dict[str, str]) -> list[list[str]]:
    """What `python` is called with on each node, in order of the nodes."""
    shown = 'printf "%s\\n" "$NODE" "$GLOO_SOCKET_IFNAME" "$@" > "$(dirname "$0")/said$NODE"'
    executable(folder / "python", f'NODE="${{SLURM_NODEID:-$PET_NODE_RANK}}"\n{shown}')
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
    environment = clean | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [path.read_text().splitlines() for path in sorted(folder.glob("said*"))]


def check_node(
    words: list[str], node: int, *, endpoint: str, run_id: str, tail: list[str], address: tuple[str, ...] = ()
) -> None:
    index, interface, flag, judge, folder, size, python, *command = words
    assert (index, interface) == (str(node), "ib0")
    assert (flag, judge) == ("-m", f"{tail[0].removesuffix('train')}launch.node")
    assert (folder, size) == (f"/data/runs/Long_1m/verdict/node{node}", "8") and Path(python).name == "python"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", run_id, "--rdzv-endpoint", endpoint, *address]
    meeting += ["--rdzv-conf", f"is_host={int(node == 0)},join_timeout=900,read_timeout=900"]
    size = ["--nnodes", "4", "--nproc-per-node", "8", "--max-restarts", "3"]
    assert command == ["-m", "torch.distributed.run", *meeting, *size, "-m", *tail]


def test_each_node_of_slurm_runs_torchrun_and_the_first_is_the_host(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    executable(tmp_path / "scontrol", 'test "$1 $2 $3" = "show hostnames n[07-10]" && printf "n%s\\n" 07 08 09 10')
    options = 'while [[ $1 == --* ]]; do echo "$1" >> "$(dirname "$0")/options"; shift; done'
    executable(
        tmp_path / "srun",
        f'{options}\nfor node in 0 1 2 3; do SLURM_NODEID=$node SLURMD_NODENAME=x$node "$@" || exit; done',
    )
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[07-10]"}
    said = said_by_nodes(tmp_path, dry_run("slurm", capsys), slurm)
    options = (tmp_path / "options").read_text().split()
    assert options == ["--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=64", "--kill-on-bad-exit=1"]
    tail = ["train", "run.toml", *SET, "--set", "launch.scheduler=slurm"]
    assert len(said) == 4
    for node, words in enumerate(said):
        check_node(words, node, endpoint="n07:29600", run_id="77", tail=tail, address=("--local-addr", f"x{node}"))


def test_a_node_that_fails_fails_the_batch_job(tmp_path, capsys):
    executable(tmp_path / "scontrol", "echo n1")
    executable(tmp_path / "srun", "exit 3")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1"}
    assert subprocess.run(["bash", "-c", dry_run("slurm", capsys)], env=environment).returncode == 3
    executable(tmp_path / "scontrol", "exit 4")  # nobody knows the first node: nothing may start
    assert subprocess.run(["bash", "-c", dry_run("slurm", capsys)], env=environment).returncode == 4


@pytest.mark.parametrize("scheduler", SUFFIX)
def test_a_node_ends_with_what_its_ranks_say(scheduler, tmp_path, capsys, monkeypatch):
    """torchrun makes 1 of every exit code; a scheduler sees what `launch` would end with, and the sentence."""
    monkeypatch.undo()
    real = f"PYTHONPATH={REPO} exec {sys.executable} -m launch.node"
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    left = '{"rank": %s, "code": %s, "error": "step 5 is saved", "host": "h", "time_s": 1}'
    executable(
        tmp_path / "python",
        f'if [[ $2 == *launch.node ]]; then shift 2; {real} "$@"; fi\nmkdir -p "$RINGFLASH_VERDICT_DIR"\n'
        f'for rank in 0 1; do printf \'{left}\' $rank "$CODE" > "$RINGFLASH_VERDICT_DIR/rank$rank-$$.json"; done\n'
        "exit 1",
    )
    executable(tmp_path / "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    text = dry_run(
        scheduler, capsys, "launch.nodes=1", "launch.processes_per_node=2", "parallel.ring=2", f"metrics.dir={tmp_path}"
    )
    script = text if scheduler == "slurm" else objects(text)[1]["spec"]["trainer"]["command"][2].replace("$$", "$")
    node = {"SLURM_NODEID": "0", "PET_NODE_RANK": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for code in (75, 2):
        done = subprocess.run(
            ["bash", "-c", script], env=os.environ | node | {"CODE": str(code)}, stderr=subprocess.PIPE
        )
        assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (code, "ringflash: step 5 is saved")


def test_each_pod_runs_torchrun_and_the_first_is_the_host(tmp_path, capsys):
    trainer = objects(dry_run("kubernetes", capsys))[1]["spec"]["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    interpreter, flag, script = trainer["command"]
    assert (interpreter, flag) == ("bash", "-c")
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", script)  # Kubernetes would read it
    for node in range(4):
        pod = {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "long-1m-node-0-0.long-1m"}
        said = said_by_nodes(tmp_path, script.replace("$$", "$"), variables | pod)
        tail = ["ringflash.train", "/etc/ringflash/run.toml", *SET, "--set", "launch.scheduler=kubernetes"]
        check_node(said[node], node, endpoint="long-1m-node-0-0.long-1m:29600", run_id="long-1m", tail=tail)


@pytest.mark.parametrize("scheduler", SUFFIX)
def test_one_node_needs_no_meeting(scheduler, capsys):
    text = dry_run(scheduler, capsys, "launch.nodes=1", "parallel.ring=8")
    assert "--standalone" in text and "rdzv" not in text and "scontrol" not in text


TOOLS = {"slurm": ("sbatch", []), "kubernetes": ("kubectl", ["create", "--filename", "-"])}


@pytest.mark.parametrize("scheduler", TOOLS)
def test_without_dry_run_the_same_text_is_submitted(scheduler, tmp_path, capfd, monkeypatch):
    tool, arguments = TOOLS[scheduler]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    paths = [f"metrics.dir={tmp_path}", f"data.path={tmp_path / 'text'}"]
    command = ["run.toml", "--scheduler", scheduler, *(part for path in paths for part in ("--set", path))]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert launch_command(command) == 2
    assert f"ringflash: {tool} is not found on this machine" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    executable(tmp_path / tool, f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/submitted; exit "${{CODE:-0}}"')
    assert launch_command(command) == 0
    assert (tmp_path / "arguments").read_text().split() == arguments
    capfd.readouterr()
    assert launch_command([*command, "--dry-run"]) == 0
    assert (tmp_path / "submitted").read_text() == capfd.readouterr().out
    monkeypatch.setenv("CODE", "5")
    assert launch_command(command) == 5
    assert f"{tool} ended with exit code 5" in capfd.readouterr().err


def test_the_folder_of_the_log_exists_before_slurm_writes_there(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    folder = tmp_path / "runs"
    overrides = [f"metrics.dir={folder}", "data.path=stdlib"]
    launch_command(["run.toml", "--scheduler", "slurm", *(p for o in overrides for p in ("--set", o))])
    assert (folder / "Long_1m").is_dir()


REFUSED = {
    "nodes that the mesh does not fill": ("slurm", ["launch.nodes=3"], "24 processes does not divide by parallel.ring"),
    "a mesh larger than the nodes": ("kubernetes", ["launch.nodes=1"], "16 ranks is more than the 8 processes"),
    "data replicas that do not fit": ("slurm", ["parallel.data=3"], "parallel.data = 3 is 48 ranks, the world has 32"),
    "an address": ("slurm", ["launch.master_address=h"], "launch.master_address = 'h' is not used"),
    "an option that has a key": ("slurm", ["slurm.options=['--nodes=5']"], "--nodes follows from launch.nodes"),
    "an option that is none": ("slurm", ["slurm.options=['-N 5']"], "slurm.options.0 = '-N 5'"),
    "an option of two lines": ("slurm", ['slurm.options=["--a=b\\nrm x"]'], "slurm.options.0 ="),
    "a variable that has a key": ("slurm", ["launch.environment.NCCL_DEBUG=INFO"], "is launch.nccl_debug"),
    "a name that Kubernetes cannot write": ("kubernetes", ["train.name=1m"], "train.name = '1m' is '1m' in Kubernetes"),
    "a name too long": ("kubernetes", [f"train.name={'a' * 41}"], "2 to 40 letters"),
    "a volume nowhere": ("kubernetes", ["kubernetes.volumes.a=b"], "kubernetes.volumes.a = 'b'"),
    "an interface list": ("slurm", ["launch.interface='ib0,ib1'"], "launch.interface = 'ib0,ib1'"),
    "R110 a key spelled wrong": ("kubernetes", ["kubernetes.imgae=a"], "did you mean kubernetes.image?"),
}


def test_what_pods_read_and_write_outlives_them():
    config = load(REPO / "configs" / "llama3_8b_128k.toml", ["launch.scheduler=kubernetes"])
    shared = [Path(folder) for folder in config.kubernetes.volumes.values()]
    for path in (config.data.path, config.data.tokenizer, config.run_dir, config.checkpoint_dir):
        assert any((Path("/workspace") / path).is_relative_to(folder) for folder in shared), path


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_cannot_run_is_refused(case, capsys):
    scheduler, overrides, message = REFUSED[case]
    arguments = [part for override in overrides for part in ("--set", override)]
    assert launch_command(["run.toml", "--scheduler", scheduler, "--dry-run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(("scheduler", "key"), [("slurm", "cpus_per_node"), ("kubernetes", "image")])
def test_what_a_scheduler_needs_is_asked_for(scheduler, key, tmp_path, capsys):
    text = "\n".join(line for line in (GOLDEN / "run.toml").read_text().splitlines() if not line.startswith(key))
    (tmp_path / "run.toml").write_text(text)
    assert launch_command([str(tmp_path / "run.toml"), "--scheduler", scheduler, "--dry-run"]) == 2
    assert f"launch.scheduler = {scheduler!r} needs" in capsys.readouterr().err


def test_a_node_rank_is_the_scheduler_s_to_give(capsys):
    assert launch_command(["run.toml", "--scheduler", "slurm", "--node-rank", "0"]) == 2
    assert "starts all nodes itself" in capsys.readouterr().err


def test_every_variable_with_a_key_is_set_by_it():
    chosen = settings(job("slurm").config)
    assert set(VARIABLE_KEYS) <= set(chosen) and set(VARIABLE_KEYS.values()) == {
        "interface", "ib_hca", "ib_timeout", "ib_retries", "nccl_debug",
    }  # fmt: skip
    saving = load(REPO / "configs" / "demo.toml")
    bare = settings(saving.model_copy(update={"checkpoint": Checkpoint()}))  # where a signal ends processes at once
    assert bare == {"OMP_NUM_THREADS": "1"}


def test_every_option_with_a_key_is_in_the_script(capsys):
    script = dry_run("slurm", capsys)
    assert all(f"#SBATCH {option}=" in script for option in set(SLURM_KEYS) - {"--ntasks"})


@pytest.mark.parametrize("scheduler", ["torchrun", "slurm"])
def test_the_shell_s_network_variables_are_shown_and_contradictions_refused(scheduler, monkeypatch, capsys):
    by_hand = ["launch.master_address=h"] if scheduler == "torchrun" else []
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")  # as the configuration says
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    text = dry_run(scheduler, capsys, *by_hand)
    assert all(word in text.split() for word in ("NCCL_P2P_LEVEL=NVL", "NCCL_DEBUG=WARN", "OMP_NUM_THREADS=6"))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    arguments = [part for override in by_hand for part in ("--set", override)]
    assert launch_command(["run.toml", "--scheduler", scheduler, "--dry-run", *arguments]) == 2
    assert "NCCL_DEBUG is 'INFO' in this shell but 'WARN' by [launch]" in capsys.readouterr().err


def test_a_shell_tells_kubernetes_nothing(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    text = dry_run("kubernetes", capsys)
    assert (
        "P2P_LEVEL" not in text
        and {"name": "OMP_NUM_THREADS", "value": "1"} in objects(text)[1]["spec"]["trainer"]["env"]
    )


def test_the_table_names_its_files():
    assert {name: module.__name__ for name, module in launch.LAUNCHERS.items()} == {
        name: f"launch.{name}" for name in ("torchrun", "slurm", "kubernetes")
    }
