"""The environment variables of a run: what [launch] says, and nothing that nobody sees.

NCCL and gloo read variables that a shell profile or a module may have set. Those are printed with the command beside
the ones from the configuration; one that contradicts the configuration is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import Config

NETWORK_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
THREADS_VARIABLE = "OMP_NUM_THREADS"
RESTART_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""1: each restart meets in a new store. In a shared one processes find the addresses of those that died
(pytorch/pytorch#135712) and the restart fails."""

SIGNALS_VARIABLE, SIGNALS = "PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""What torchrun passes on to its processes. It knows the first four by itself, and would die of the others."""
PATIENCE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds until torchrun kills what it told to stop; read by torch 2.12 and newer, 30 s before."""


def settings(config: Config) -> dict[str, str]:
    """The variables that the configuration sets, sorted by name. One thread a process, unless it says otherwise."""
    launch = config.launch
    chosen = {
        "NCCL_DEBUG": launch.nccl_debug,
        # '=' asks NCCL for this very name; otherwise eth1 would also mean eth10
        "NCCL_SOCKET_IFNAME": f"={launch.interface}" if launch.interface else None,
        "GLOO_SOCKET_IFNAME": launch.interface,
        "NCCL_IB_HCA": launch.ib_hca,
        "NCCL_IB_TIMEOUT": launch.ib_timeout,
        "NCCL_IB_RETRY_CNT": launch.ib_retries,
        RESTART_VARIABLE: 1 if launch.max_restarts else None,
        SIGNALS_VARIABLE: SIGNALS if config.checkpoint.every else None,
        PATIENCE_VARIABLE: launch.stop_timeout_s if config.checkpoint.every else None,
        THREADS_VARIABLE: 1 if launch.processes_per_node > 1 else None,
    }
    named = {name: str(value) for name, value in chosen.items() if value is not None}
    return dict(sorted((named | launch.environment).items()))


def settings_here(config: Config) -> dict[str, str]:
    """`settings`, and what the processes would inherit from this shell: its network variables, its number of threads.

    Raises: ValueError for a network variable of this shell that says something else than the configuration.
    """
    chosen = settings(config)
    network = {name: value for name, value in os.environ.items() if name.startswith(NETWORK_PREFIXES)}
    for name in sorted(network.keys() & chosen.keys()):
        if network[name] != chosen[name]:
            raise ValueError(
                f"{name} is {network[name]!r} in this shell but {chosen[name]!r} by [launch]: "
                "unset the variable, or give the key the value that is meant"
            )
    if THREADS_VARIABLE in os.environ and THREADS_VARIABLE not in config.launch.environment:
        chosen[THREADS_VARIABLE] = os.environ[THREADS_VARIABLE]
    return dict(sorted((network | chosen).items()))


def assignment(name: str, value: str) -> str:
    """The variable as a word of shell. `NAME==value` is read as a comparison by people and tools: it is quoted."""
    return f"{name}='{value}'" if re.fullmatch(r"=[\w.,:-]+", value) else f"{name}={shlex.quote(value)}"
