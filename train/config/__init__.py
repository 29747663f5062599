"""The typed configuration of a run: one TOML file, `--set` overrides, and every rule between keys.

Here lives what can be judged before a GPU is touched. Nothing of torch, transformers or deepspeed is imported, because
`launch` reads this package on a login node. Called by `launch` and by `train/__main__`.

    sections.py   a class for each table of the file: its keys, their types, defaults and meaning
    rules.py      what must hold between keys; RULES is the table
    architecture.py  the rules of it that are of [model]: what [model.config] may hold
    run.py        Config: the tables together, and the sizes that follow from them
    file.py       load: TOML and overrides -> Config
    folders.py    check_paths: the folders that the keys name
    packages.py   check_packages: what is to be installed for them
    pretrained.py resolve: what the folder of model.pretrained says of the model
    heads.py      the tensors of that folder: whether they fit, and their fingerprint
    refusal.py    ConfigError, and the one sentence for what pydantic refused
"""

from .architecture import MODEL_REFUSED
from .file import load
from .folders import check_paths, was_pruned
from .packages import check_packages
from .pretrained import resolve
from .refusal import ConfigError
from .run import Batch, Config
from .sections import (
    Checkpoint,
    Data,
    Evaluation,
    Kubernetes,
    Launch,
    Lora,
    Memory,
    Metrics,
    Model,
    Needle,
    Optimizer,
    Parallel,
    Rope,
    Sequence,
    Slurm,
    Source,
    Train,
)

__all__ = [
    "MODEL_REFUSED",
    "Batch",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Data",
    "Evaluation",
    "Kubernetes",
    "Launch",
    "Lora",
    "Memory",
    "Metrics",
    "Model",
    "Needle",
    "Optimizer",
    "Parallel",
    "Rope",
    "Sequence",
    "Slurm",
    "Source",
    "Train",
    "check_packages",
    "check_paths",
    "load",
    "resolve",
    "was_pruned",
]
