"""Which ranks of a ring share a node: given as a number or as a mesh, or asked of the host names.

Ranks of a node are consecutive in the group, and every node has equally many: only such rings can be rings of rings.
Called by `group.Ring`.
"""

from __future__ import annotations

import itertools
import socket

import torch.distributed as dist

from . import agreement

HOSTS = "hosts"


def ranks_per_node(
    topology: int | str | dist.DeviceMesh | None, group: dist.ProcessGroup | None, timeout_s: float
) -> int:
    """How many ranks of the group share a node; all of them where nothing is said.

    topology: see `group.Ring`
    Raises: TypeError, ValueError.
    """
    size = dist.get_world_size(group) if group else 1
    if topology is None:
        return size
    if topology == HOSTS:
        return _of_hosts(group, timeout_s)
    if isinstance(topology, int) and not isinstance(topology, bool):
        if topology < 1 or size % topology:
            raise ValueError(f"topology={topology} ranks a node must be at least 1 and divide {size} ranks")
        return topology
    if isinstance(topology, str):
        raise ValueError(f"topology={topology!r} is unknown; it must be {HOSTS!r}, a number of ranks a node or a mesh")
    if not (dist.is_available() and isinstance(topology, dist.DeviceMesh)):
        kind = type(topology).__name__
        raise TypeError(
            f"topology={topology!r} is {kind}; it must be {HOSTS!r}, a number of ranks a node, a DeviceMesh or None"
        )
    if topology.ndim != 2:
        raise ValueError(f"topology is a mesh of {topology.ndim} dimensions; it must have two (node, rank of a node)")
    ranks = topology.mesh.flatten().tolist()
    members = dist.get_process_group_ranks(group) if group else [0]
    if ranks != members:
        raise ValueError(f"topology is a mesh of ranks {ranks}; it must hold those of the group in order, {members}")
    return topology.size(1)


def _of_hosts(group: dist.ProcessGroup | None, timeout_s: float) -> int:
    """The ranks of a host, by the names that the ranks tell each other through the group's store."""
    if group is None or dist.get_world_size(group) == 1:
        return 1
    names = agreement.tell(group, socket.gethostname(), timeout_s)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    counts = {count for _, count in runs}
    if len(counts) > 1 or len({name for name, _ in runs}) < len(runs):
        told = ", ".join(f"{count} on {name}" for name, count in runs)
        raise ValueError(
            f"topology={HOSTS!r}: the ranks in order are {told}; every host must have equally many, one after the other"
        )
    return counts.pop()
