"""How much arithmetic a step is, and how much a card can do: what stands behind model FLOP/s and MFU.

Pure functions on plain numbers; no torch. Called by `loop` and `plan`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .memory import FLOAT, Sizes, Step

FORMULA = (
    "model FLOPs = 6 * matmul parameters * tokens + 12 * heads * head_dim * visible pairs, "
    "the pairs summed over layers and documents. Matmul parameters: all but norms and the embedding lookup; the output "
    "head is in, of the experts those that a token goes through, and frozen ones count 4. "
    "A pair is a query and a key that it sees (causal, sliding window, each document by its own length). "
    "Attention: 2 products forward, 4 backward. Neither recomputation nor padding is counted."
)
"""What the numbers mean, written into every metrics file. Source: the rule of Megatron-LM, training.py."""

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "MI300X": 1300.0,
    "MI325X": 1300.0,
    "MI250X": 191.5,
}
"""Part of a card's name -> dense bf16 peak in TFLOP/s; the first that fits counts. Source: vendors' data sheets."""


Lengths = Iterable[int] | Mapping[int, int]
"""Of documents, in tokens; or a length -> how many have it."""


@dataclass(frozen=True)
class ModelShape:
    """What the FLOPs of a decoder model depend on.

    matmul_params: parameters that multiply a token, the output head included, the embedding lookup excluded
    heads, head_dim: query heads and their dimension
    windows: one entry a layer: keys that a query sees, itself included; None = all before it
    frozen_params: those of matmul_params that get no gradient
    """

    matmul_params: int
    heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    frozen_params: int = 0

    def with_adapters(self, params: int) -> "ModelShape":
        """The same model, frozen, with so many parameters of adapters beside it."""
        return replace(self, matmul_params=self.matmul_params + params, frozen_params=self.matmul_params)


class StepFlops(NamedTuple):
    """Model FLOPs of one step, forward and backward, over all ranks."""

    dense: int
    attention: int


def describe(config: Any) -> ModelShape:
    """The shape of a model from its transformers config (Llama, Qwen, Mistral, Gemma: gated MLP; Qwen3-MoE).

    Raises: ValueError for other experts and for kinds of attention layers that have no count here.
    """
    for name in ("num_experts", "num_local_experts"):
        if getattr(config, name, None) and config.model_type != "qwen3_moe":
            raise ValueError(f"{name} = {getattr(config, name)}: of models with experts qwen3_moe alone is counted")
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    attention = 2 * width * head_dim * (heads + config.num_key_value_heads)
    return ModelShape(
        matmul_params=config.num_hidden_layers * attention + _mlps(config) + config.vocab_size * width,
        heads=heads,
        head_dim=head_dim,
        windows=windows_of(config),
    )


def _mlps(config: Any) -> int:
    """Parameters of all MLPs that a token goes through: of experts the chosen ones, and the router."""
    width, layers, experts = config.hidden_size, config.num_hidden_layers, getattr(config, "num_experts", 0)
    sparse = 0
    if experts:
        every, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
        sparse = layers // every - sum(1 for layer in dense if 0 <= layer < layers and (layer + 1) % every == 0)
    chosen = 3 * config.num_experts_per_tok * config.moe_intermediate_size + experts if sparse else 0
    return width * (sparse * chosen + (layers - sparse) * 3 * config.intermediate_size)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Of each layer of a transformers config, see `ModelShape.windows`. ValueError for kinds of layers unknown here."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"layer_types holds {kind!r}: FLOPs are counted for {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees in a causal document of `length` tokens, itself among them."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def step_flops(shape: ModelShape, lengths: Lengths) -> StepFlops:
    """Model FLOPs of a step on documents of these lengths, in tokens, padding left out. See FORMULA."""
    documents = Counter(lengths)
    pairs = sum(
        layers * number * visible_pairs(length, window)
        for window, layers in Counter(shape.windows).items()
        for length, number in documents.items()
    )
    per_token = 6 * shape.matmul_params - 2 * shape.frozen_params
    return StepFlops(per_token * _tokens(documents), 12 * shape.heads * shape.head_dim * pairs)


def _tokens(documents: Counter[int]) -> int:
    return sum(length * number for length, number in documents.items())


def peak_tflops(device_name: str, dtype: str, given: float | None) -> tuple[float | None, str | None]:
    """(dense peak of one device in TFLOP/s, None), or (None, why it is not known). `given` is metrics.peak_tflops."""
    if given is not None:
        return given, None
    card = next((card for card in PEAK_TFLOPS if card in device_name), None)
    if card is None:
        return None, f"no peak is known for {device_name!r}: set metrics.peak_tflops"
    if dtype != "bfloat16":
        return None, f"the peak of {card} is known for bfloat16, the model runs in {dtype}: set metrics.peak_tflops"
    return PEAK_TFLOPS[card], None


class Speed(NamedTuple):
    """TFLOP/s of attention, of the arithmetic that is done: a backward is 2.5 forwards."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """What a card does, measured.

    attention: head dimension -> its speed
    matmul: TFLOP/s of matrix products
    memory, host: GB/s (10^9 bytes), of what `elementwise` counts; of the link to host memory, each way
    host_memory: GB/s of reads and writes of a machine's memory, by one process
    """

    attention: Mapping[int, Speed]
    matmul: float
    memory: float
    host: float
    host_memory: float

    def attention_of(self, head_dim: int) -> Speed:
        """That of a head dimension; of one between two that were measured the slower one's.

        Below all of them it falls with the dimension: the exponential of a pair costs the same.
        """
        least = min(self.attention)
        if head_dim < least:
            forward, backward = (rate * head_dim / least for rate in self.attention[least])
            return Speed(forward, backward)
        below = max(dim for dim in self.attention if dim <= head_dim)
        above = min((dim for dim in self.attention if dim >= head_dim), default=below)
        return min(self.attention[below], self.attention[above], key=lambda speed: speed.backward)


RATES = {
    "H200": Rates(
        attention={128: Speed(663, 531), 64: Speed(531, 471), 256: Speed(716, 535)},
        matmul=695, memory=2560, host=55, host_memory=35,
    )
}  # fmt: skip
"""Part of a card's name -> its rates, in bf16 (docs/decisions.md says how each was found).

D = 128, products and memory: inside steps of 131,072 tokens of Llama-3-8B's shape, by events and profile, at commit
ea4eefd; the rows in docs/results.md are newer. There attention is 7% slower than alone, where the card is cool.
D = 64 and 256: alone, causal, 64k tokens (docs/results.md).
host_memory: of 16 cores, from an offloaded update of 1.9e9 numbers in pieces of 2^20, at commit 0c623ac.
"""


HEAD_PRODUCTS = {"chunked": 4, "liger": 3}
"""memory.loss -> products of the output head in a step: ours computes the logits again in the backward."""


class Passes(NamedTuple):
    """How often parts run: attention forward, layers forward, and MLPs forward more often than their layers.

    Each backward runs once.
    """

    attention: float
    layer: float
    mlp: float


def passes(checkpoint: str, every: int, *, tiled: bool) -> Passes:
    """Of [memory]: a recomputed layer runs twice, one between kept states three times.

    A recomputation for a backward ends where all is there that was saved: before the last product of an MLP, a third of
    it, or before an MLP in tiles, which runs once more in its own backward.
    """
    again = 0.0 if checkpoint == "none" else 1 + (every - 1) / every
    mlp = (1.0 if tiled else 0.0) - ((1.0 if tiled else 1 / 3) if again else 0.0)
    return Passes(1 + (again if checkpoint == "full" else 0), 1 + again, mlp)


def step_seconds(
    shape: ModelShape, lengths: Lengths, rates: Rates, runs: Passes, *,
    mlp_params: int, head_params: int, loss: str = "chunked", ranks: int = 1, moved_bytes: int = 0,
    elementwise_bytes: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step whose work is even over `ranks`, part by part, communication between ranks hidden.

    lengths: documents, tokens; mlp_params: of all layers; head_params: of the output head; loss: `memory.loss`
    moved_bytes: of one rank to host memory, and as many back: what computing does not hide of it is counted
    elementwise_bytes: read and written a token, see `elementwise`
    """
    documents = Counter(lengths)
    tokens = _tokens(documents)
    forward = step_flops(shape, documents).attention / 3
    layers = shape.matmul_params - head_params
    dense = 2 * tokens * (layers * (runs.layer + 2) + mlp_params * runs.mlp + head_params * HEAD_PRODUCTS[loss])
    speed = rates.attention_of(shape.head_dim)
    parts = {
        "attention forward": forward * runs.attention / (speed.forward * 1e12),
        "attention backward": 2.5 * forward / (speed.backward * 1e12),
        "matrix products": dense / (rates.matmul * 1e12),
        "elementwise": tokens * elementwise_bytes / (rates.memory * 1e9),
    }
    parts = {name: seconds / ranks for name, seconds in parts.items()}
    moving = 2 * moved_bytes / (rates.host * 1e9)
    return parts | {"host link, not hidden": max(0.0, moving - sum(parts.values()))}


def elementwise(sizes: Sizes, runs: Passes, *, tile: int | None, number_bytes: int) -> int:
    """Bytes a token that layers read and write in a step beside matrix products and attention.

    Counted op by op as transformers writes norms, rotary positions, gates and sums, each once from memory and once
    back. tile: `memory.mlp_tile`.
    """
    b, width, mlp = number_bytes, sizes.width, sizes.mlp_width
    heads = sizes.query_width + sizes.key_width
    normed = 2 * width + (heads if sizes.head_norms else 0)
    norm = _norm(b) * normed
    forward = norm + b * (6 * width + 10 * heads + 5 * mlp)
    backward = NORM_BACKWARD * normed + b * (15 * width + 16 * heads + 9 * mlp)
    if tile is not None:  # tiles are put together; norms and gates run once more; gradients of weights are added up
        together = 2 * b * (normed + width)
        forward += together
        backward += together + norm + 5 * b * mlp + 3 * (2 * FLOAT + b) * width * mlp // tile
        backward += (4 * _norm(b) + 3 * 2 * b) * width  # for the MLP, and put together for q, k and v
    last = 3 * b * width + (b * (2 * width + 5 * mlp) if tile is not None else 0)  # where a recomputation ends
    return round(sizes.layers * (forward * runs.layer + backward - (last if runs.layer > 1 else 0)))


def head_elementwise(sizes: Sizes, chunk: int | None, *, number_bytes: int) -> int:
    """The same of the loss: logits in both directions, the sum of the head's gradient once a chunk, the last norm.

    chunk: `memory.loss_chunk`, or None for Liger: its kernel reads logits twice and writes their gradient over them,
    sums are made in the product, and gradients of states are scaled in the backward.
    """
    b = number_bytes
    norm = sizes.width * (_norm(b) + NORM_BACKWARD + 4 * b)
    if chunk is None:
        return sizes.vocabulary * 3 * b + norm + sizes.width * 2 * b
    casts = 3 * (FLOAT + b) if b < FLOAT else 0
    return sizes.vocabulary * (6 * FLOAT + casts) + sizes.head_params * (2 * FLOAT + b) // chunk + norm


def update_bytes(step: Step, *, clips: bool) -> tuple[int, int]:
    """Bytes of a number that an update in host memory sends over the link, and that it reads and writes there.

    Gradients out, at ZeRO 3 back and out again, weights back. Pieces stay in caches, so each tensor counts once:
    weights and states read and written, gradients read, before that scaled if they are clipped; then weights rounded.
    """
    moved = FLOAT * (3 if step.zero == 3 else 1) + step.number_bytes
    return moved, FLOAT * (3 + 2 * step.states + (2 if clips else 0)) + FLOAT + step.number_bytes


NORM_BACKWARD = 96
"""Bytes that the backward of a norm moves for each number."""


def _norm(number_bytes: int) -> int:
    """Bytes that a norm's forward moves for each number, which it computes in fp32."""
    casts = 2 * (FLOAT + number_bytes) if number_bytes < FLOAT else 0
    return casts + 5 * FLOAT + 2 * number_bytes
