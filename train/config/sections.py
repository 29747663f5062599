"""Every table and key of the file: one class a table, one field a key, under it what it means.

A key is judged here by its type alone; what it must be to others is in `rules`. A new table is a class here and a line
in `run.Config`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]  # the integers of TOML
Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Gigabytes = Annotated[float, Field(gt=0, le=1e9)]  # 10^18 bytes at most
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]  # a year: clocks and libraries overflow far behind it
Named = Annotated[str, Field(min_length=1)]  # an empty path would be the folder at hand
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """One table of the file: frozen, strict types, only listed keys; the docstring under a key describes it."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Rope(Section):
    """Rotary positions; left out: as the model has them. In Gemma 3 they are those of the layers without a window."""

    type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] | None = None
    """How the frequencies are scaled, in place of what the model has; the next keys say by how much."""
    theta: Positive | None = None
    """Base of the frequencies; left out: the model's."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """All types but default: how much longer the sequences become."""
    original_length: Count | None = None
    """All but default and linear: tokens of the sequences that the model was trained on before."""
    attention_factor: Positive | None = None
    """yarn, longrope: what the rotations are multiplied by; left out: follows from factor."""
    beta_fast: Positive | None = None
    """yarn: rotations over the original length from which a frequency stays as it is; left out: 32."""
    beta_slow: Positive | None = None
    """yarn: rotations up to which a frequency is divided by factor; left out: 1."""
    low_freq_factor: Positive | None = None
    """llama3: original_length divided by it is the wavelength above which frequencies are divided by factor."""
    high_freq_factor: Positive | None = None
    """llama3: original_length divided by it is the wavelength below which frequencies stay as they are."""
    short_factor: list[Positive] | None = None
    """longrope: a divisor for each frequency, if sequence.length is at most original_length."""
    long_factor: list[Positive] | None = None
    """longrope: a divisor for each frequency, if sequence.length is more."""


class Model(Section):
    pretrained: Named | None = None
    """Local folder with config.json and safetensors of transformers, which the weights come from; left out: random."""
    architecture: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text"] | None = None
    """`model_type` of a decoder model of transformers; left out: that of pretrained."""
    config: dict[str, Any] = {}
    """The table [model.config], handed to `AutoConfig.for_model`; with pretrained: changes of its config.json."""
    dtype: Literal["float32", "bfloat16"]
    """Type of the parameters in forward and backward; the optimizer's copy is float32."""
    rope: Rope = Rope()
    """The table [model.rope], fixed once for sequence.length."""

    @property
    def is_known(self) -> bool:
        """Whether architecture and shape stand here: with pretrained, not before `resolve` has read its config.json."""
        return self.architecture is not None and (self.pretrained is None or "vocab_size" in self.config)


class Source(Section):
    path: Named
    """Folder, or one file of a format but "datasets"; for "text" also "stdlib": Python's standard library."""
    format: Literal["text", "jsonl", "parquet", "datasets"]
    """ "datasets": whatever the datasets library loads from a local folder, through its cache unless it saved it."""
    pattern: Annotated[str, Field(pattern=r"^[^/]")] | None = None
    """Which files of a folder are read, as a glob; left out: **/*.txt, **/*.jsonl or **/*.parquet."""
    field: Named = "text"
    """All formats but "text": key or column that holds the text, or with chat the list of messages."""
    chat: bool = False
    """Whether the field holds messages with role and content: the loss is on the assistant's answers only."""
    tokens: bool = False
    """Whether the field holds token ids of data.tokenizer, made before the run, so that nothing is encoded in it."""
    split: Named | None = None
    """Format "datasets" only: which split, where there are several; left out: train."""
    weight: Positive = 1.0
    """Share of the tokens, relative to the other sources."""

    @property
    def glob(self) -> str:
        """The pattern of the files, the default one if none is given."""
        return self.pattern or {"text": "**/*.txt"}.get(self.format, f"**/*.{self.format}")


class Data(Section):
    path: Named | None = None
    """Folder of text files, one such file, or the word "stdlib": the short form of one source of format "text"."""
    pattern: Annotated[str, Field(pattern=r"^[^/]")] | None = None
    """Which files of a folder are read, as a glob, each one document; left out: **/*.txt."""
    sources: list[Source] = []
    """Tables [[data.sources]], in place of path: what is read, and mixed by weight."""
    tokenizer: Named = "bytes"
    """ "bytes", or a local folder with a tokenizer of transformers."""
    shuffle: bool = True
    """Whether the documents are read in an order drawn from train.seed, or as they are listed."""
    document_mask: bool = True
    """Whether attention stays inside each document, or is causal over the whole packed sequence."""

    @property
    def all_sources(self) -> list[Source]:
        """What is read: `sources`, or the one that `path` stands for."""
        return self.sources or [Source(path=self.path or "", format="text", pattern=self.pattern)]


class Sequence(Section):
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Tokens of one packed sequence, over all ranks that share it."""
    layout: Literal["contiguous", "zigzag", "striped", "balanced", "auto"] = "zigzag"
    """Which tokens of the sequence each rank holds; auto: chosen for each batch, by the windows of the model's layers
    and the documents."""


class Parallel(Section):
    ring: Count
    """Ring size: blocks of keys and values rotate over this many ring ranks."""
    ulysses: Count = 1
    """Ulysses size: attention heads are spread over this many ranks."""
    data: Count | None = None
    """Data replicas; left out: world size / (ring * ulysses)."""
    zero: Annotated[int, Field(ge=0, le=3)] = 2
    """DeepSpeed ZeRO stage, over all ranks."""
    arrangement: Literal["ring", "double", "gather"] | None = None
    """How ranks pass blocks on: one ring; a ring of nodes around rings of ranks; all at once, whose memory grows with
    the sequence. Left out: double where parallel.topology tells of several nodes in a ring, else ring. Changes nothing
    in a ring of 1."""
    topology: Count | Literal["hosts"] | None = None
    """Which ranks of a ring share a node: so many that follow each other, or those with one host name."""
    transit: Literal["float32", "bfloat16"] = "float32"
    """Type of gradients on their way round the ring; bfloat16 moves half the bytes and is rounded at every hop.
    Changes nothing in a ring of 1."""


class Optimizer(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: Annotated[float, Field(gt=0, le=1e30)]
    """Learning rate at its highest, after the warmup."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW only: decay of the two running moments."""
    eps: Positive = 1e-8
    """AdamW only: added to the root of the second moment."""
    momentum: Fraction = 0.0
    """SGD only."""
    weight_decay: NotNegative = 0.0
    """AdamW: decoupled from the gradient. SGD: added to the gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0 to lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warmup."""
    min_lr: NotNegative = 0.0
    """Cosine and linear only: the learning rate of the last step."""
    clip_norm: NotNegative = 0.0
    """Largest global gradient norm; 0 = no clipping."""


class Train(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    """Name of the run and of its folder: letters, digits, '.', '_', '-'."""
    steps: Count
    """Optimizer steps of the run."""
    global_batch: Count | None = None
    """Sequences a step, over all data replicas; derived from the next two when left out."""
    micro_batch: Count | None = None
    """Sequences a forward pass of one data replica; 1 where attention stays inside documents."""
    accumulation: Count | None = None
    """Forward passes a step of one data replica."""
    trainable: Literal["all", "lora"] = "all"
    """What is trained: all weights, or the low-rank adapters of [lora] beside frozen weights of model.pretrained."""
    seed: Seed = 0
    """Seed of the weights and of the order of the documents."""
    deterministic: bool = False
    """Whether repeated runs give bitwise the same gradients."""
    max_nonfinite: Annotated[int, Field(ge=0)] = 0
    """Steps with a loss or gradient of NaN or infinity that are passed over, weights untouched; one more ends it."""
    timeout_s: Seconds = 600
    """Seconds after which a rank that waits for another gives up."""
    self_test: bool = True
    """Whether the run starts with the probe that compares the engine's gradient with the closed form."""


class Lora(Section):
    """Read when train.trainable is "lora". There is no dropout: ranks would draw different numbers."""

    rank: Count = 16
    """Width of the adapters."""
    alpha: Count = 32
    """What an adapter adds is multiplied by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    """Last words of the names of the layers that get an adapter."""


class Memory(Section):
    checkpoint: Literal["none", "full", "selective"] = "selective"
    """Activation checkpointing; selective keeps attention's (out, lse), so the backward runs no second ring."""
    checkpoint_every: Count = 1
    """Hidden states are kept before every k-th layer alone; those in between are made again one after the other."""
    offload: list[Literal["activations", "attention", "optimizer"]] = []
    """What is in host memory until it is needed: "activations", the hidden states that are kept; "attention", what
    checkpoint = "selective" keeps; "optimizer", the optimizer's numbers, which are updated there."""
    mlp_tile: Count | None = None
    """Local tokens whose MLPs and norms are computed at one time, again in the backward; left out: all. What norms
    return is not kept then."""
    loss: Literal["chunked", "liger"] = "chunked"
    """Who makes the loss of training: "chunked", ours; "liger", the package liger-kernel on GPUs, which makes the
    gradients in the forward, in chunks of its own. Evaluation is always ours."""
    loss_chunk: Count = 1024
    """Local tokens whose logits exist at one time: in an evaluation, and in training unless the loss is Liger's."""
    device_gb: Gigabytes | None = None
    """Memory of one GPU, in 10^9 bytes, which a step must fit into; left out: that of the GPU that is there."""
    host_gb: Gigabytes | None = None
    """Memory of one machine, in 10^9 bytes, for all its processes; left out: what it says it has, which a virtual
    machine whose memory grows on demand says too low."""


class Checkpoint(Section):
    every: Count | None = None
    """Steps from one checkpoint to the next; the last step is saved too. Left out: nothing is saved."""
    dir: Named | None = None
    """Folder of the checkpoints, seen by all nodes; left out: `checkpoints` in the folder of the run."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Count | None = None
    """Checkpoints of steps that divide by this are kept too; a multiple of checkpoint.every."""
    resume: Named = "auto"
    """ "auto": the newest whole checkpoint of the folder, if there is one; "no"; or the folder of one checkpoint.
    Processes that torchrun or slurm starts again go on from the newest that their job saved since, whatever it says."""


class Needle(Section):
    lengths: list[Count] = []
    """Tokens of the texts in which a pass key is hidden, up to sequence.length; left out: none is hidden."""
    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = [0.0, 0.25, 0.5, 0.75, 1.0]
    """Where it lies: 0 = at the beginning of the text, 1 = right before the question."""
    samples: Count = 4
    """Texts a length and depth, each with a key of its own."""
    seed: Seed = 0
    """Seed of the keys."""


class Evaluation(Section):
    every: Count | None = None
    """Steps from one evaluation to the next; behind the last step is one too. Left out: `ringflash eval` alone."""
    sources: list[Source] = []
    """Tables [[evaluation.sources]]: held-out documents, each read once, in an order that never changes."""
    tokens: Count | None = None
    """At most this many tokens of them; left out: all."""
    positions: Annotated[list[Count], Field(min_length=1)] | None = None
    """Borders of the ranges of loss by position, tokens; left out: the powers of two from 128 on."""
    needle: Needle = Needle()
    """The table [evaluation.needle]."""

    @property
    def borders(self) -> list[int]:
        """`positions`, or what stands for it: up to 2^31, the longest sequence."""
        return self.positions or [2**power for power in range(7, 31)]


class Metrics(Section):
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Mode of the wandb run; online needs a key."""
    project: Named = "ringflash"
    """wandb project."""
    peak_tflops: Positive | None = None
    """Dense peak of one GPU in the model's dtype, TFLOP/s; left out: known cards by name, otherwise MFU is null."""
    dir: Named = "runs"
    """Folder that holds the folder of the run."""


class Launch(Section):
    nodes: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Machines."""
    processes_per_node: Annotated[int, Field(ge=1, le=2**12)]
    """Processes on each machine: its GPUs."""
    cpus_per_node: Count | None = None
    """CPU cores of each machine for its processes; slurm and kubernetes need it."""
    scheduler: Literal["torchrun", "slurm", "kubernetes"] = "torchrun"
    """What starts the processes: torchrun on this machine, or on those that slurm or Kubernetes give."""
    master_address: Named | None = None
    """Name or address of the first machine; torchrun needs it when there are more."""
    master_port: Annotated[int, Field(ge=1, le=65535)] = 29500
    """Port on the first machine where several machines meet; one machine alone takes a free one."""
    join_timeout_s: Seconds = 600
    """Seconds until all machines must have met."""
    stop_timeout_s: Seconds = 300
    """Seconds that a run told to stop has for the end of its step and a checkpoint; then it is killed."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Times that torchrun starts all processes again after one has failed; each is a new start of the run."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    """Network interface of the machines, like "ib0", for NCCL's sockets and for gloo; left out: their choice."""
    ib_hca: Annotated[str, Field(pattern=r"^\S+$")] | None = None
    """InfiniBand adapters in NCCL's notation, like "=mlx5_0,mlx5_1"; left out: all."""
    ib_timeout: Annotated[int, Field(ge=1, le=31)] | None = None
    """InfiniBand acknowledge timeout, as the exponent n of 4.096 us * 2^n; left out: NCCL's."""
    ib_retries: Annotated[int, Field(ge=0, le=7)] | None = None
    """Times that InfiniBand sends again before NCCL gives up; left out: NCCL's."""
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL says; left out: only errors that end the run."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """The table [launch.environment]: further variables for the processes."""


class Slurm(Section):
    """Read when launch.scheduler is slurm."""

    options: list[Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=\S.*)?$")]] = []
    """Further options of sbatch, like "--partition=gpu", "--time=7-00:00:00", "--mem=0" (all memory of a node)."""


class Kubernetes(Section):
    """Read when launch.scheduler is kubernetes."""

    image: Named | None = None
    """Container image with ringflash installed; needed."""
    runtime: Named = "torch-distributed"
    """ClusterTrainingRuntime of Kubeflow Trainer that the job refines."""
    namespace: Named | None = None
    """Namespace of the job; left out: kubectl's."""
    volumes: dict[str, Annotated[str, Field(pattern=r"^/")]] = {}
    """The table [kubernetes.volumes]: persistent volume claim -> folder where the processes see it."""
