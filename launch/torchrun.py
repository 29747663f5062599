"""torchrun, the launcher of PyTorch: on this machine, and inside what the schedulers start on each of theirs."""

import shlex
import sys

from .environment import assignment, settings_here
from .job import Ending, Job, run

MODULE = "torch.distributed.run"


def shown(job: Job) -> str:
    """One line for this machine, or one a node for a dry run that is of no node."""
    nodes = range(job.config.launch.nodes) if job.node is None else [job.node]
    return "".join(f"{_line(job, node)}\n" for node in nodes)


def start(job: Job) -> Ending:
    """Run the part of this machine to its end."""
    assert job.node is not None
    print(_line(job, job.node), flush=True)
    return run(job, command(job, job.node), node=job.node, settings=settings_here(job.config))


def command(job: Job, node: int) -> list[str]:
    """The command of a node.

    One node alone takes a free port, so that runs on one host do not meet.
    """
    launch = job.config.launch
    head = [sys.executable, "-m", MODULE]
    if launch.nodes == 1:
        return [*head, "--standalone", *_rest(job)]
    endpoint = f"{launch.master_address}:{launch.master_port}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", job.config.train.name, "--rdzv-endpoint", endpoint]
    meeting += ["--rdzv-conf", _conf(job, str(int(node == 0)))]
    return [*head, *meeting, *_rest(job)]


def script_line(job: Job, *, python: str, run_id: str, host: str, node: str, address: str | None = None) -> str:
    """The command of any node as a line of shell, where only the node itself knows who it is. Its end is judged there.

    python: the interpreter
    run_id, host, node: shell that expands to the name of the rendezvous, to the name or address of the first node, and
        to the index of the node itself
    address: shell for the node's own name, as the others can reach it; None = what its full host name is
    """
    launch, rest = job.config.launch, shlex.join(_rest(job))
    judge = f"{shlex.quote(python)} -m {job.worker.removesuffix('train')}launch.node"
    judged = f"{judge} {shlex.quote(str(job.verdict_folder('')))}{node} {launch.processes_per_node}"
    head = f"{judged} {shlex.quote(python)} -m {MODULE}"
    if launch.nodes == 1:
        return f"{head} --standalone {rest}"
    meeting = f'--rdzv-backend c10d --rdzv-id "{run_id}" --rdzv-endpoint "{host}:{launch.master_port}"'
    meeting += f' --local-addr "{address}"' if address else ""
    is_host = f"$([ {node} = 0 ] && echo 1 || echo 0)"
    return f'{head} {meeting} --rdzv-conf "{_conf(job, is_host)}" {rest}'


def _conf(job: Job, is_host: str) -> str:
    """Who hosts the rendezvous is said, because torchrun's guess needs a host name that resolves to itself.

    join_timeout, read_timeout: seconds until the nodes must all be there, and until the first must answer
    """
    wait = job.config.launch.join_timeout_s
    return f"is_host={is_host},join_timeout={wait},read_timeout={wait}"


def _rest(job: Job) -> list[str]:
    launch = job.config.launch
    size = ["--nnodes", str(launch.nodes), "--nproc-per-node", str(launch.processes_per_node)]
    return [*size, "--max-restarts", str(launch.max_restarts), "-m", job.worker, *job.arguments]


def _line(job: Job, node: int) -> str:
    variables = settings_here(job.config) | job.verdict_setting(node)
    return " ".join([*(assignment(*variable) for variable in variables.items()), shlex.join(command(job, node))])
