"""torchrun, the launcher of PyTorch, on one node or many."""

import sys

from .job import Job


def commands(job: Job) -> list[list[str]]:
    """The command of each node, in order of the nodes.

    One node without a port: torchrun takes a free one, so that runs on one host do not meet. Many nodes: the static
    rendezvous, because only there does torchrun honour a node rank, which says which ranks a node holds.
    """
    launch = job.config.launch
    worker = ["-m", job.worker, *job.arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    size = ["--nproc-per-node", str(launch.processes_per_node)]
    if launch.master_port is None:
        return [[*torchrun, "--standalone", *size, *worker]]
    meeting = ["--master-addr", launch.master_address or "localhost", "--master-port", str(launch.master_port)]
    nodes = ["--nnodes", str(launch.nodes)]
    return [[*torchrun, *nodes, "--node-rank", str(node), *meeting, *size, *worker] for node in range(launch.nodes)]
