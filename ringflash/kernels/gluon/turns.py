"""Who does what, and when, where the programs of a kernel stay and do many jobs: one table, made on the host. numpy.

The hardware gives each new program to the SM that is free first. Programs that stay have no such help, so their jobs
are dealt beforehand, in rounds of one job for each: the longest of a round goes to the program with the least so far.
"""

from __future__ import annotations

import numpy as np

from .jobs import JOB_STEPS


def heads_in_order(jobs: np.ndarray, num_heads: int, section: int) -> tuple[np.ndarray, np.ndarray]:
    """(job, head), both [num_heads * n], of all heads in the order in which they are done.

    Head by head, each from its first row to its last, so that programs which run side by side read the same keys. The
    last `section` heads come together and sorted as `jobs` is, the longest first, so that all programs end together.
    """
    first = num_heads - section
    i_job = np.concatenate(
        (np.tile(np.argsort(jobs[:, 0], kind="stable"), first), np.repeat(np.arange(len(jobs)), section))
    )
    i_head = np.concatenate((np.repeat(np.arange(first), len(jobs)), np.tile(np.arange(first, num_heads), len(jobs))))
    return i_job, i_head


def dealt(costs: np.ndarray, num_programs: int) -> np.ndarray:
    """The jobs, int64 [n], in an order in which program p does those at p, p + num_programs, ..., and all end together.

    costs: [n] of each job, in the order in which they should be done
    """
    so_far = np.zeros(num_programs)
    rounds = np.full((-(-len(costs) // num_programs), num_programs), -1)
    for i, taken in enumerate(rounds):
        jobs = np.arange(i * num_programs, min((i + 1) * num_programs, len(costs)))
        jobs = jobs[np.argsort(-costs[jobs], kind="stable")]
        programs = np.argsort(so_far, kind="stable")[: len(jobs)]
        taken[programs] = jobs
        so_far[programs] += costs[jobs]
    # the last round may be short: those that have a job in it become the first programs
    rounds = rounds[:, np.argsort(rounds[-1] < 0, kind="stable")]
    return rounds[rounds >= 0]


def turns(jobs: np.ndarray, batch: int, heads: int, section: int, num_programs: int) -> np.ndarray:
    """Every head's jobs as `walk.job_of_turn` reads them, int32 [batch * heads * n, 10]; program p does each
    num_programs-th line from line p on. jobs: of one head, the longest first, see `jobs.jobs_by_query`.

    A line is a job, the batch entry and the head.
    """
    i_job, i_head = heads_in_order(jobs, batch * heads, section)
    order = dealt(jobs[i_job, 6] - jobs[i_job, 3] + JOB_STEPS, num_programs)
    return np.column_stack((jobs[i_job[order]], *np.divmod(i_head[order], heads))).astype(np.int32)
