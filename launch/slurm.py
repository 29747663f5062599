"""Slurm: a batch script with one task a node, which is torchrun."""

import shlex
import sys

from . import torchrun
from .environment import assignment, settings_here
from .job import Ending, Job
from .submit import submit

FIRST_NODE = """\
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST_NODE=${hosts%%$'\\n'*}
"""


def shown(job: Job) -> str:
    """The batch script.

    Each node expands its own part of the command: `srun` starts it once a node, and only there SLURM_NODEID is known.
    """
    launch = job.config.launch
    line = torchrun.script_line(
        job,
        python=sys.executable,
        run_id="$SLURM_JOB_ID",
        host="$FIRST_NODE",
        node='"$SLURM_NODEID"',
        address="$SLURMD_NODENAME",
    )
    exports = [f"export {assignment(*variable)}" for variable in settings_here(job.config).items()]
    step = ["srun", f"--nodes={launch.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={launch.cpus_per_node}"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job)),
        "set -euo pipefail",
        *exports,
        *(FIRST_NODE.splitlines() if launch.nodes > 1 else ()),
        "# one torchrun a node; when one fails, srun ends the others",
        "# shellcheck disable=SC2016  # the nodes expand what is quoted",
        f"{shlex.join(step)} --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {line}')}",
    ]
    return "\n".join(lines) + "\n"


def start(job: Job) -> Ending:
    """Submit it; sbatch prints the number of the job."""
    return submit(["sbatch"], shown(job))


def _options(job: Job) -> list[str]:
    """The size of the job, a warning before its time is over if it can save, then what [slurm] adds for the site."""
    launch, added = job.config.launch, job.config.slurm.options
    warned = any(option.startswith("--signal=") for option in added)
    warning = [f"--signal=USR1@{launch.stop_timeout_s}"] if job.config.checkpoint.every and not warned else []
    return [
        f"--job-name={job.config.train.name}",
        f"--nodes={launch.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={launch.cpus_per_node}",
        f"--gpus-per-node={launch.processes_per_node}",
        f"--output={shlex.quote(str(job.config.run_dir / 'slurm-%j.log'))}",
        *warning,
        *added,
    ]
