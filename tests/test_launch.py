"""launch/: what would run, what is refused before anything runs, and how the end of a run is judged."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pool as pools
import pytest

from launch import torchrun
from launch.__main__ import WORDS, main
from launch.__main__ import launch as launch_command
from launch.environment import PATIENCE_VARIABLE, SIGNALS, SIGNALS_VARIABLE
from launch.job import VERDICT_VARIABLE, Job, judge, run, sibling, sibling_name, supervise
from train import verdict
from train.config import load
from train.verdict import Verdict

REPO = Path(__file__).resolve().parent.parent
DEMO = REPO / "configs" / "demo.toml"
LLAMA = REPO / "configs" / "llama3_8b_128k.toml"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_NODES = ["--nodes", "2", "--set", "launch.master_address=a b", "--set", "launch.master_port=29555"]
TWO_NODES += ["--set", "parallel.ring=16"]


def variables_and_command(line: str) -> tuple[list[str], list[str]]:
    words = shlex.split(line)
    start = words.index(sys.executable)
    return words[:start], words[start:]


@pytest.mark.parametrize(
    ("path", "processes"), [(DEMO, 4), (LLAMA, 8)], ids=lambda value: getattr(value, "stem", value)
)
def test_a_dry_run_prints_the_command_of_one_node(path, processes, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_command([str(path), "--dry-run", "--set", "train.steps=400"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    (threads, *stopping, folder), command = variables_and_command(line)
    assert folder == f"{VERDICT_VARIABLE}=runs/{path.stem}/verdict/node0" and threads == "OMP_NUM_THREADS=1"
    assert stopping == [f"{SIGNALS_VARIABLE}={SIGNALS}", f"{PATIENCE_VARIABLE}=300"]
    worker = ["-m", "train", str(path), "--set", "train.steps=400"]
    size = ["--nnodes", "1", "--nproc-per-node", str(processes), "--max-restarts", "0"]
    assert command == [*TORCHRUN, "--standalone", *size, *worker]


def test_a_dry_run_prints_one_line_a_node(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")  # already chosen: kept
    assert launch_command([str(LLAMA), *TWO_NODES, "--dry-run"]) == 0
    lines = [variables_and_command(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    for node, ((threads, *_, folder), command) in enumerate(lines):
        assert threads == "OMP_NUM_THREADS=16" and folder.endswith(f"/verdict/node{node}")
        meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "llama3_8b_128k", "--rdzv-endpoint", "a b:29555"]
        meeting += ["--rdzv-conf", f"is_host={int(node == 0)},join_timeout=600,read_timeout=600"]
        size = ["--nnodes", "2", "--nproc-per-node", "8"]
        assert command[: len(TORCHRUN) + 12] == [*TORCHRUN, *meeting, *size]
        assert command[-2:] == ["--set", "launch.nodes=2"]  # the workers must see the same configuration
    assert launch_command([str(LLAMA), *TWO_NODES, "--dry-run", "--node-rank", "1"]) == 0
    assert [variables_and_command(line) for line in capsys.readouterr().out.splitlines()] == [lines[1]]


def test_the_installed_command_is_the_same(capsys):
    assert main(["launch", str(DEMO), "--dry-run"]) == 0
    installed = capsys.readouterr().out
    assert launch_command([str(DEMO), "--dry-run"]) == 0
    assert installed == capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "module"),
    [("train", "train"), ("export", "train.export"), ("plan", "train.plan"), ("report", "train.report")],
)
def test_a_word_of_the_trainer_becomes_its_module(monkeypatch, word, module):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append((path, command)) or sys.exit(0))
    with pytest.raises(SystemExit):
        main([word, str(DEMO), "--set", "train.steps=4", "--help"])
    assert started == [(sys.executable, [sys.executable, "-m", module, str(DEMO), "--set", "train.steps=4", "--help"])]
    assert find_spec(f"{module}.__main__" if module == "train" else module)


def test_every_word_is_listed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name} +{re.escape(word.help)}$", out, re.MULTILINE) for name, word in WORDS.items())


def test_an_evaluation_starts_the_processes_of_the_run(capsys):
    """Its verdicts lie apart, since the run may still be training; nothing of [data] is needed."""
    words = ["eval", str(DEMO), "--checkpoint", "runs/a b/7", "--set", "data.path=/absent"]
    assert main([*words, "--dry-run"]) == 0
    (*variables, folder), command = variables_and_command(capsys.readouterr().out)
    assert folder == f"{VERDICT_VARIABLE}=runs/demo/evaluation/verdict/node0"
    assert main(["launch", str(DEMO), "--set", "data.path=/absent", "--dry-run"]) == 0
    (*of_training, other), training = variables_and_command(capsys.readouterr().out)
    assert variables == of_training and folder != other
    assert command == [*training, "--set", 'checkpoint.resume="runs/a b/7"', "--evaluate"]
    assert load(DEMO, [command[-2]]).checkpoint.resume == "runs/a b/7"


@pytest.mark.parametrize(("package", "trainer"), [("launch", "train"), ("ringflash.launch", "ringflash.train")])
def test_the_trainer_is_the_sibling_of_either_name(monkeypatch, package, trainer):
    monkeypatch.setattr("launch.job.__package__", package)
    assert sibling_name("train") == trainer


def test_a_login_node_needs_no_torch():
    dry_run = f"launch.__main__.launch([{str(DEMO)!r}, '--dry-run'])"
    heavy = "{'torch', 'transformers', 'deepspeed', 'wandb'} & sys.modules.keys()"
    code = f"import sys, launch.__main__; {dry_run}; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, stdout=subprocess.DEVNULL)


REFUSED = {
    "R110 a key spelled wrong": (["--set", "parallel.ulises=4"], "did you mean parallel.ulysses?"),
    "R110 a key in the wrong section": (["--set", "train.length=4"], "did you mean sequence.length?"),
    "R109 a number written as a string": (["--set", "parallel.ring='4'"], "parallel.ring = '4' (a string)"),
    "a ring larger than the world": (["--set", "parallel.ring=8"], "8 ranks is more than the 4 processes"),
    "a missing data folder": (["--set", "data.path=/absent"], "data.path = '/absent' is not there"),
    "an unknown scheduler": (["--scheduler", "cron"], "launch.scheduler = 'cron'"),
    "no node": (["--nodes", "0"], "launch.nodes = 0"),
    "several nodes and no rank": ([*TWO_NODES, "--set", "parallel.ring=8"], "--node-rank which of 0 to 1"),
    "a node rank that is not there": (["--node-rank", "1"], "--node-rank 1: 0 to 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_exit_code_2_and_one_sentence(case, capsys, monkeypatch):
    monkeypatch.setattr("launch.torchrun.run", lambda *_, **__: pytest.fail("something was started"))
    arguments, message = REFUSED[case]
    assert launch_command([str(DEMO), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.count("\n") == 1 and err.startswith("ringflash: ")


def test_a_dry_run_does_not_need_the_data_but_a_run_does():
    assert launch_command([str(LLAMA), "--dry-run", "--set", "data.path=/absent"]) == 0
    assert launch_command([str(LLAMA), "--set", "data.path=/absent"]) == 2


@pytest.mark.parametrize("command", [["verify"], ["launch"], ["launch", str(DEMO), "--verbose"], []], ids=str)
def test_a_command_that_does_not_exist(command):
    with pytest.raises(SystemExit) as refusal:
        main(command)
    assert refusal.value.code == 2


def said(rank: int, error: str = "", at: float = 0.0) -> Verdict:
    return Verdict(rank, int(bool(error)), error, f"host{rank}", at)


def stopped(rank: int) -> Verdict:
    return Verdict(rank, 75, "stopped by SIGTERM: step 5 is saved", f"host{rank}", 2.0)


def reported(rank: int, code: int) -> str:
    return f"""[0]:
  time      : 2026-01-01_00:00:00
  host      : node7
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 99)
  error_file: <N/A>
  traceback : ...
"""


ENDINGS = {
    "all well": ([said(0), said(1)], 0, "", 0, ""),
    "abort at teardown": ([said(0), said(1)], 1, reported(1, -6), 0, "all 2 ranks ended well; exit code 1 came from"),
    "no verdict but exit code 0": ([said(0)], 0, "", 1, "1 of 2 ranks ended before"),
    "R99 the first to fail is the cause": (
        [said(0, "RuntimeError: connection closed", at=9.0), said(1, "ValueError: boom", at=8.0)],
        1,
        reported(0, 1) + reported(1, 1),
        1,
        "rank 1 on host1 failed: ValueError: boom",
    ),
    "R99 a killed rank is the cause, not who missed it": (
        [said(0, "RuntimeError: connection closed", at=9.0)],
        1,
        reported(0, 1) + reported(1, -9),
        1,
        "rank 1 on node7 was killed by SIGKILL",
    ),
    "a rank that torchrun ended is not the cause": (
        [said(1, "ValueError: boom")],
        1,
        reported(0, -15) + reported(1, 1),
        1,
        "rank 1 on host1 failed: ValueError: boom",
    ),
    "an exit without a word": ([said(0)], 1, reported(1, 3), 1, "rank 1 on node7 ended with exit code 3"),
    "torchrun itself was killed": ([], -9, "", 1, "2 of 2 ranks ended before they could say how; exit code -9"),
    "all were stopped": ([stopped(0), stopped(1)], 1, reported(0, 75), 75, "stopped by SIGTERM: step 5 is saved"),
    "one was stopped and one is gone": ([stopped(0)], 1, reported(1, -9), 1, "rank 1 on node7 was killed by SIGKILL"),
    "one was stopped and one failed": ([stopped(0), said(1, "boom", at=1.0)], 1, "", 1, "rank 1 on host1 failed: boom"),
    "all refuse alike": (
        [Verdict(rank, 2, "train.steps = 0", "host", 0.0) for rank in range(2)],
        1,
        reported(0, 2),
        2,
        "train.steps = 0",
    ),
    "a failure outlives exit code 0": ([said(0), said(1, "ValueError: boom")], 0, "", 1, "rank 1 on host1 failed"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_the_verdicts_decide(case):
    verdicts, code, report, expected, message = ENDINGS[case]
    ending = judge({v.rank: v for v in verdicts}, 2, code=code, report=report)
    assert ending.code == expected
    assert ending.message.startswith(message) and bool(ending.message) == bool(message)


def test_a_node_may_hold_any_ranks():
    """The rendezvous gives the ranks: a node of two may hold 6 and 7."""
    ending = judge({6: said(6)}, 2, code=1, report=reported(7, 3))
    assert ending == (1, "rank 7 on node7 ended with exit code 3 before it could say why")
    assert judge({6: said(6), 7: said(7)}, 2, code=0, report="") == (0, "")


def test_a_verdict_is_read_back(tmp_path):
    verdict.write(tmp_path / "v", 3, code=1, error="ValueError: boom")
    verdict.write(tmp_path / "v", 0, code=0)
    verdicts = verdict.read_all(tmp_path / "v")
    assert sorted(verdicts) == [0, 3] and verdicts[0].code == 0 and verdicts[3].code == 1
    assert verdicts[3].error == "ValueError: boom" and verdicts[3].host and verdicts[3].time_s > 0
    verdict.clear(tmp_path / "v", 3)  # torchrun starts the rank again
    verdict.clear(tmp_path / "absent", 3)
    assert sorted(verdict.read_all(tmp_path / "v")) == [0]
    assert verdict.read_all(tmp_path / "absent") == {}
    assert sibling("train.verdict") is verdict


WORKER = """
import os, signal, sys, time
from train import verdict
rank, case = int(os.environ["RANK"]), sys.argv[1]
folder = os.environ["RINGFLASH_VERDICT_DIR"]
if case != "well" and rank == 2:
    if case == "raise":
        verdict.write(folder, rank, code=1, error="ValueError: boom")
        sys.exit(1)
    if case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if case in ("raise", "kill"):
    time.sleep(60)
if case == "stop":
    def stop(number, frame):
        verdict.write(folder, rank, code=75, error=f"stopped by {number}")
        sys.exit(75)
    signal.signal(signal.SIGUSR1, stop)
    open(f"{folder}/up{rank}", "w").close()
    time.sleep(60)
verdict.write(folder, rank, code=0)
if case == "abort" and rank == 2:
    time.sleep(1)
    os.abort()
"""


def job(*overrides: str, worker: str = "train", arguments: tuple[str, ...] = ()) -> Job:
    return Job(load(DEMO, overrides), worker, arguments)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A job whose workers need no torch, and end as they are told."""
    (tmp_path / "stub_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    return lambda case: job(f"metrics.dir={tmp_path}", worker="stub_worker", arguments=(case,))


RUNS = {
    "well": (0, ""),
    "abort": (0, "all 4 ranks ended well; exit code 1"),
    "raise": (1, "rank 2 on {host} failed: ValueError: boom"),
    "kill": (1, "rank 2 on {host} was killed by SIGKILL"),
}


@pytest.mark.parametrize("case", RUNS)
def test_R99_a_run_under_torchrun(stub, case, capfd):
    code, message = RUNS[case]
    stale = Path(stub(case).verdict_setting(0)[VERDICT_VARIABLE])
    for rank in range(4):  # an earlier run of the name said that all was well
        verdict.write(stale, rank, code=0)
    started = time.monotonic()
    ending = torchrun.start(replace(stub(case), node=0))
    assert time.monotonic() - started < 30
    assert ending.code == code
    host = ending.message.split(" on ")[-1].split(" ")[0]
    assert ending.message.startswith(message.format(host=host)) and bool(message) == bool(ending.message)
    if case != "well":
        assert "FAILED" in capfd.readouterr().err  # what torchrun says is passed on


@pytest.mark.parametrize(("left", "code"), [(0, 0), (None, 1)])
def test_a_second_run_of_the_name_does_not_speak_for_the_first(tmp_path, monkeypatch, left, code):
    """It is refused while the first goes on: it takes away nothing that the first left, and is not heard for it."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    leave = f"from train import verdict; verdict.write({str(tmp_path)!r}, 0, code={{}}, error='of one rank')"
    refused = [sys.executable, "-c", f"import subprocess; subprocess.run({[sys.executable, '-c', leave.format(2)]})"]
    second = [sys.executable, "-m", "launch.node", str(tmp_path), "1", *refused]
    ranks = [[sys.executable, "-c", leave.format(left)]] if left is not None else []
    first = f"import subprocess; print(*(subprocess.run(one).returncode for one in {[*ranks, second]}))"
    ending = supervise([sys.executable, "-c", first], folder=tmp_path, size=1, settings={})
    assert ending.code == code and "of one rank" not in ending.message
    assert sorted(one.code for one in map(read_verdict, tmp_path.glob("rank*.json"))) == [*([left] * len(ranks)), 2]


def test_a_folder_that_takes_no_verdict_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    ending = supervise([sys.executable, "-c", ""], folder=tmp_path / "file" / "node0", size=1, settings={})
    assert ending == (2, f"{tmp_path}/file/node0 cannot be written, where ranks say how they ended: Not a directory")


def read_verdict(file):
    return Verdict(**json.loads(file.read_text()))


def test_R101_two_runs_on_one_host_do_not_meet(stub):
    """Ten times, by forks of one process that has imported torch: that is what takes torchrun's time."""
    context = pools.context("gloo")
    small = ["launch.processes_per_node=2", "parallel.ring=2", *metrics(stub)]
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    for turn in range(10):
        jobs = [replace(stub("well"), config=load(DEMO, [f"train.name=r{turn}{i}", *small])) for i in range(2)]
        processes = [
            context.Process(target=pools.as_torchrun, args=(torchrun.command(one, 0), one.verdict_setting(0) | path))
            for one in jobs
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert [len(verdict.read_all(one.verdict_setting(0)[VERDICT_VARIABLE])) for one in jobs] == [2, 2]


def metrics(stub) -> list[str]:
    return [f"metrics.dir={stub('well').config.metrics.dir}"]


def test_a_warning_reaches_every_rank_and_their_code_comes_back(stub):
    config = load(DEMO, [*metrics(stub), "checkpoint.every=5", "launch.max_restarts=1"])
    folder = Path(stub("stop").verdict_setting(0)[VERDICT_VARIABLE])

    def warn_the_launcher():
        while len(list(folder.glob("up*"))) < 4:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=warn_the_launcher).start()
    folder.mkdir(parents=True)
    assert torchrun.start(replace(stub("stop"), config=config, node=0)) == (75, f"stopped by {int(signal.SIGUSR1)}")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_ends_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    waiting = f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"

    def end_the_launcher():
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_the_launcher).start()
    ending = run(job(f"metrics.dir={tmp_path}"), [sys.executable, "-c", waiting], node=0, settings={})
    assert ending == (128 + signal.SIGTERM, "stopped by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
