"""Kubernetes: a TrainJob of Kubeflow Trainer (2.2 or newer) whose pods run torchrun, one pod a node.

The configuration travels along in a ConfigMap, so that the pods read the file that was checked here. The image holds
`ringflash` installed as a package. Names and limits of the API: trainer.kubeflow.org/v1alpha1, checked in the tests
with Kubeflow's own models (PyPI: kubeflow-trainer-api).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from . import torchrun
from .environment import settings
from .job import Ending, Job
from .submit import submit

CONFIG_FOLDER = "/etc/ringflash"
WORKER = "ringflash.train"
CONTAINER = "node"
"""Name that Kubeflow's runtimes give to the job and the container of the trainer."""
MARGIN_S = 30
"""How much longer than torchrun Kubernetes waits before it kills."""
NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")


def shown(job: Job) -> str:
    """The ConfigMap and the TrainJob as YAML."""
    objects = [_config_map(job), _train_job(job)]
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1_000_000)


def start(job: Job) -> Ending:
    """Create both; kubectl prints their names. A job of the same name is not replaced."""
    return submit(["kubectl", "create", "--filename", "-"], shown(job))


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is, not escaped."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _metadata(job: Job) -> dict[str, str]:
    """Kubernetes names nothing with capitals, dots or '_'; a name that stays wrong is refused."""
    name = re.sub(r"[._]", "-", job.config.train.name.lower())
    if not NAME.fullmatch(name):
        raise ValueError(
            f"train.name = {job.config.train.name!r} is {name!r} in Kubernetes, which accepts 2 to 40 letters, digits "
            "and '-', a letter first and no '-' last"
        )
    namespace = job.config.kubernetes.namespace
    return {"name": name} | ({"namespace": namespace} if namespace else {})


def _config_map(job: Job) -> dict[str, Any]:
    file = Path(job.arguments[0])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {file.name: file.read_text(encoding="utf-8")},
    }


def _train_job(job: Job) -> dict[str, Any]:
    launch, kubernetes = job.config.launch, job.config.kubernetes
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"name": kubernetes.runtime},
            "trainer": {
                "image": kubernetes.image,
                "command": ["bash", "-c", _script(job)],
                "env": [{"name": name, "value": _literal(value)} for name, value in settings(job.config).items()],
                "numNodes": launch.nodes,
                "numProcPerNode": launch.processes_per_node,
                "resourcesPerNode": {
                    "requests": {"cpu": str(launch.cpus_per_node)},
                    "limits": {"nvidia.com/gpu": str(launch.processes_per_node)},
                },
            },
            "runtimePatches": [_patch(job)],
        },
    }


def _script(job: Job) -> str:
    """Kubeflow tells each pod its index and the address of the first one."""
    file, *overrides = job.arguments
    inside = replace(job, worker=WORKER, arguments=(f"{CONFIG_FOLDER}/{Path(file).name}", *overrides))
    line = torchrun.script_line(
        inside,
        python="python",
        run_id=_metadata(job)["name"],
        host="$PET_MASTER_ADDR",
        node='"$PET_NODE_RANK"',
    )
    return _literal(f"exec {line}")


def _literal(text: str) -> str:
    """What Kubernetes turns into the text: it would replace `$(NAME)`, and reads `$$` as one dollar."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _patch(job: Job) -> dict[str, Any]:
    """Volumes: the configuration, memory that processes share (64 MiB unless said), and the claims of [kubernetes]."""
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": _metadata(job)["name"]}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for index, (claim, path) in enumerate(job.config.kubernetes.volumes.items()):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{index}", "mountPath": path})
    pod: dict[str, Any] = {"volumes": volumes, "containers": [{"name": CONTAINER, "volumeMounts": mounts}]}
    if job.config.checkpoint.every:
        pod["terminationGracePeriodSeconds"] = job.config.launch.stop_timeout_s + MARGIN_S
    template = {"spec": {"template": {"spec": pod}}}
    jobs = [{"name": CONTAINER, "template": template}]
    return {"manager": "ringflash/launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
