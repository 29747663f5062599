"""How much memory a step takes, part by part, on the device and beside it: what stands behind `ringflash plan`.

Pure functions on plain numbers; no torch. The peak is looked for in the moments that can have it (`Moment`), and what a
moment holds is counted tensor by tensor, as the models of transformers, our kernels and DeepSpeed make them. Called by
`plan`, and by the benchmark of a step.

Letters: E width, A = H D query width, K = G D key width, F width of the MLP, V vocabulary; b bytes of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .config import Memory

FLOAT = 4
BUCKET_NUMEL = 200_000_000
"""Most gradients in DeepSpeed's buffers; the same as `engine.BUCKET_NUMEL`."""
UPDATE_NUMEL = 1 << 20
"""Numbers that are updated at a time in host memory; the same as `host_update.UPDATE_NUMEL`."""
GROUP_NUMEL = 10**9
"""Numbers that DeepSpeed updates at a time at ZeRO 3."""
SUM_BYTES = 2**30
"""Of dq in fp32 beside dq, where a head takes no more; the same as `kernels.gluon.launch.SUM_BYTES`."""
SUMMED_DIM = 128
"""The largest head dimension whose dq is summed in memory; that of wider ones is written once."""
MAX_TOKENS = 2**31 - 1
"""Of a sequence: positions are int32."""
LAID_OUT = "weights as they are laid out"
"""What of host memory a process takes at its start alone."""

Parts = dict[str, int]
"""What -> bytes."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of a decoder model.

    width E, query_width A, key_width K, mlp_width F (of experts: those that a token goes through); heads, kv_heads
    layer_params, mlp_params: of one layer, and of its MLP alone; head_params: V E; embeddings: 2, or 1 where tied
    head_norms: whether queries and keys are normalised head by head
    """

    layers: int
    width: int
    query_width: int
    key_width: int
    mlp_width: int
    heads: int
    kv_heads: int
    vocabulary: int
    layer_params: int
    mlp_params: int
    embeddings: int
    head_norms: bool

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.embeddings * self.head_params


def sizes_of(config: Any) -> Sizes:
    """The sizes of a model from its transformers config. Norms' weights are left out."""
    width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    experts = getattr(config, "num_experts", 0) or 0
    mlp_width = config.num_experts_per_tok * config.moe_intermediate_size if experts else config.intermediate_size
    mlp = (
        3 * width * (experts * config.moe_intermediate_size if experts else config.intermediate_size) + experts * width
    )
    return Sizes(
        layers=config.num_hidden_layers,
        width=width,
        query_width=queries,
        key_width=keys,
        mlp_width=mlp_width,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=config.vocab_size,
        layer_params=2 * width * (queries + keys) + mlp,
        mlp_params=mlp,
        embeddings=1 if config.tie_word_embeddings else 2,
        head_norms=config.model_type.startswith(("qwen3", "gemma3")),
    )


@dataclass(frozen=True)
class Step:
    """What memory depends on beside the model.

    tokens: of a forward pass of one rank; sequence: of the whole sequences that they are part of
    document: tokens of each document, left out: one fills the sequence
    number_bytes: b; ring: ring size; arrangement: of it; inner: ring ranks of a node, for "double"
    transit_bytes: of a gradient under way; ulysses: ranks that split the heads; ranks: over which ZeRO shards
    zero: its stage, or None for a model alone, whose gradients stay in its type
    states: fp32 numbers of the optimizer for each weight, beside the weight's own; trained: weights that get gradients
    accumulation: forward passes of an update
    """

    tokens: int
    sequence: int
    number_bytes: int
    memory: Memory
    ring: int = 1
    arrangement: str = "ring"
    inner: int = 0
    transit_bytes: int = FLOAT
    ulysses: int = 1
    ranks: int = 1
    zero: int | None = None
    states: int = 2
    trained: int | None = None
    accumulation: int = 1
    document: int | None = None

    @property
    def gathered(self) -> float:
        """What a gather brings to a rank, in blocks of a rank: all, or what others have of a document."""
        others = self.ring - 1
        return others if self.document is None else min(others, self.document / (self.tokens * self.ulysses))


class Moment(NamedTuple):
    """A moment of the step and what the device holds then."""

    name: str
    parts: Parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Prediction(NamedTuple):
    """peak: the moment with the most; host: of one process, in host memory."""

    peak: Moment
    host: Parts

    @property
    def device_bytes(self) -> int:
        return self.peak.total

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def predict(sizes: Sizes, step: Step) -> Prediction:
    """The memory of a step, at its peak."""
    return Prediction(max(moments(sizes, step), key=lambda moment: moment.total), host(sizes, step))


def host(sizes: Sizes, step: Step) -> Parts:
    """What `memory.offload` puts into host memory, of one process; at ZeRO 3 what its start takes, where that is more.

    There DeepSpeed lays the weights one behind the other, by way of host memory.
    """
    start = {LAID_OUT: trained_params(sizes, step) * step.number_bytes // step.ranks} if step.zero == 3 else {}
    return max(offloaded(sizes, step), start, key=lambda parts: sum(parts.values()))


def offloaded(sizes: Sizes, step: Step) -> Parts:
    """What `memory.offload` puts into host memory, of one process, in a step."""
    parts, offload = {}, step.memory.offload
    if "activations" in offload:
        parts["hidden states"] = boundaries(sizes, step) * step.tokens * sizes.width * step.number_bytes
    if "attention" in offload:
        parts["attention's results"] = sizes.layers * step.tokens * pair(sizes, step)
    if "optimizer" in offload and step.zero is not None:  # the weights, their gradients, the optimizer's states
        own = trained_params(sizes, step) // step.ranks
        parts["optimizer"] = (2 + step.states) * FLOAT * own
        parts["weights on their way"] = step.number_bytes * (min(GROUP_NUMEL, own) if step.zero == 3 else own)
        sums = step.zero == 3 or (step.accumulation > 1 and step.number_bytes == FLOAT)
        parts["gradients as they came"] = FLOAT * own if sums else 0
        parts["inside the update"] = 3 * FLOAT * min(UPDATE_NUMEL, own) if step.states == 2 else FLOAT * own
    return parts


def trained_params(sizes: Sizes, step: Step) -> int:
    """Weights that get gradients."""
    return sizes.params if step.trained is None else step.trained


def boundaries(sizes: Sizes, step: Step) -> int:
    """Layers whose hidden states are kept."""
    return -(-sizes.layers // step.memory.checkpoint_every)


def pair(sizes: Sizes, step: Step) -> int:
    """Bytes a token of attention's (out, lse)."""
    return sizes.query_width * step.number_bytes + FLOAT * sizes.heads


def moments(sizes: Sizes, step: Step) -> Iterator[Moment]:
    """Those that can be the peak: the backward of the layer beside which most is held, and before it what makes the
    layer again, the loss, the last norm, the update.
    """
    lasting = weights(sizes, step) | data(sizes, step)
    left = max(turns(sizes, step), key=lambda left: sum(held(sizes, step, left).values()))
    place = {sizes.layers: "first layer", 1: "last layer"}.get(left, f"layer {sizes.layers - left + 1}")
    works = [("MLP", mlp_backward), ("attention", attention_backward)]
    if step.memory.mlp_tile is not None:
        works.append(("the MLP's norm", norm_backward))
    for name, work in works:
        yield Moment(f"backward of {name} in its {place}", lasting | held(sizes, step, left) | work(sizes, step))
    if step.memory.checkpoint != "none":
        before = held(sizes, step, left, own=False)
        yield Moment(f"recomputation in its {place}", lasting | before | recomputation(sizes, step, left))
    lasting |= kept(sizes, step, sizes.layers, inside=False)
    yield Moment("loss", lasting | loss(sizes, step))
    head = gradients(sizes, step, sizes.head_params)
    yield Moment("backward of the last norm", lasting | head | last_norm(sizes, step))
    whole = gradients(sizes, step, sizes.params)
    yield Moment("update", weights(sizes, step) | whole | update(sizes, step))


def held(sizes: Sizes, step: Step, left: int, *, own: bool = True) -> Parts:
    """What layers hold when the backward is in the one with this number, from 1 for the lowest.

    own: with the gradients of its weights
    """
    done = (sizes.layers - left + own) * sizes.layer_params + sizes.head_params
    return gradients(sizes, step, done) | kept(sizes, step, left)


def turns(sizes: Sizes, step: Step) -> list[int]:
    """Layers, the first of the backward in front, among which is the one beside whose backward most is held.

    Gradients grow evenly from layer to layer until all trained weights have theirs, and what layers keep falls evenly
    from group to group and inside a group, but for its lowest layer and for the last two layers. So it is at an end of
    a group, and the group is the first, the last, or where gradients stop growing, or next to one of them: few are
    asked, however many there are.
    """
    layers, every = sizes.layers, step.memory.checkpoint_every
    full = layers + 1 - (trained_params(sizes, step) - sizes.head_params) // sizes.layer_params
    found = {full, full - 1, full + 1}
    for layer in (1, layers, min(max(full, 1), layers)):
        group = (layer - 1) // every
        for start in ((group + near) * every for near in (-2, -1, 0, 1, 2)):
            found |= {start + 1, start + 2, start + 3, start + every - 1, start + every}
    return sorted({min(max(layer, 1), layers) for layer in found}, reverse=True)


def weights(sizes: Sizes, step: Step) -> Parts:
    """What lasts: weights, the optimizer's numbers, DeepSpeed's buffers."""
    trained = trained_params(sizes, step)
    if step.zero is None:
        return {"weights": sizes.params * step.number_bytes}
    shards = step.ranks if step.zero else 1
    parts = {"weights": sizes.params * step.number_bytes // (step.ranks if step.zero == 3 else 1)}
    if step.zero == 3:
        parts["gathered weights"] = max(2 * sizes.layer_params, sizes.head_params) * step.number_bytes
    masters = 1 if step.zero else 0  # without ZeRO the optimizer updates the fp32 weights themselves
    if "optimizer" not in step.memory.offload:
        parts["optimizer"] = (masters + step.states) * FLOAT * trained // shards
    if step.zero:
        parts["buckets"] = min(BUCKET_NUMEL, trained) * (step.number_bytes + FLOAT)
    return parts


def gradients(sizes: Sizes, step: Step, done: int) -> Parts:
    """Of so many weights, those whose backward is done; ZeRO 3, and 1 in bf16, have room for all from the start.

    ZeRO 2 has room for all of the rank from its first bucket on.
    """
    trained = trained_params(sizes, step)
    done = trained if step.accumulation > 1 else min(done, trained)
    if step.zero is None:
        return {"gradients": done * step.number_bytes}
    if "optimizer" in step.memory.offload:  # at ZeRO 1 they leave behind the last backward, otherwise by the bucket
        sums = step.zero == 2 and step.accumulation > 1 and step.number_bytes < FLOAT
        return {"gradients": FLOAT * done if step.zero == 1 else sums * FLOAT * trained // step.ranks}
    if step.zero > 1:
        return {"gradients": FLOAT * trained // step.ranks}
    return {"gradients": FLOAT * (trained if step.zero == 1 and step.number_bytes < FLOAT else done)}


def data(sizes: Sizes, step: Step) -> Parts:
    """ids and labels of the whole sequence and of the rank, positions, cosines and sines, intervals."""
    head_dim = sizes.query_width // sizes.heads
    a_token = 24 + 2 * head_dim * step.number_bytes + 16
    return {"data": 16 * step.sequence + a_token * step.tokens}


def kept(sizes: Sizes, step: Step, layers: int, *, inside: bool = True) -> Parts:
    """What these many lowest layers keep for their backward.

    inside: the highest of them is being recomputed; its own are counted with its work
    """
    memory, states = step.memory, sizes.width * step.number_bytes
    if memory.checkpoint == "none":
        return {"activations of all layers": step.tokens * (layers - inside) * sum(graph(sizes, step).values())}
    number = -(-layers // memory.checkpoint_every)
    below = (layers - 1) % memory.checkpoint_every if inside else 0  # in its group: their states are made again first
    if "activations" in memory.offload:
        number = min(number, 1 + (inside and not below))  # of the group at work; at its lowest layer of the next one
    parts = {"hidden states": step.tokens * states * (number + below - inside)}
    if memory.checkpoint == "selective":
        pairs = min(layers, 2) if "attention" in memory.offload else layers
        parts["attention's results"] = step.tokens * pair(sizes, step) * (pairs - inside)
    return parts


def norm(width: int, rows: int, step: Step) -> int:
    """Bytes a token that a norm keeps, its input among them where that is kept for it alone.

    rows: numbers that it divides by. In tiles it keeps its input; otherwise what it computes in fp32, and what it
    rounds that to.
    """
    if step.memory.mlp_tile is not None:
        return width * step.number_bytes
    return FLOAT * width + step.number_bytes * width + FLOAT * rows


def graph(sizes: Sizes, step: Step) -> Parts:
    """Bytes a token that autograd keeps of one layer."""
    b, tiled = step.number_bytes, step.memory.mlp_tile is not None
    queries, keys = sizes.query_width * b, sizes.key_width * b
    parts = {
        "norms": 2 * norm(sizes.width, 1, step),
        "inputs of projections": 0 if tiled else 2 * sizes.width * b,  # in tiles norms make them again
        "queries, keys, values": queries + 2 * keys,
        "attention's own results": pair(sizes, step),
        "MLP": 0 if tiled else 4 * sizes.mlp_width * b,
    }
    if sizes.head_norms:
        parts["norms"] += norm(sizes.query_width + sizes.key_width, sizes.heads + sizes.kv_heads, step)
    return parts


def keeps_input(step: Step) -> bool:
    """Whether torch's checkpoint holds a layer's input beside all that its graph keeps.

    A norm that is not in tiles keeps another copy in fp32; states that were brought back or made again are let go of.
    """
    memory = step.memory
    if memory.checkpoint == "none" or memory.checkpoint_every > 1 or "activations" in memory.offload:
        return False
    return memory.mlp_tile is None and step.number_bytes < FLOAT


def mlp_backward(sizes: Sizes, step: Step) -> Parts:
    """The layer at work, right before the gradient of its MLP is done."""
    states = sizes.width * step.number_bytes
    parts = {name: step.tokens * size for name, size in graph(sizes, step).items()}
    if keeps_input(step):
        parts["input of the layer"] = step.tokens * states
    parts["gradients of states"] = step.tokens * states * (1 if step.memory.mlp_tile is None else 2)
    if step.memory.mlp_tile is None:
        parts["gradients in the MLP"] = 2 * step.tokens * sizes.mlp_width * step.number_bytes
    else:
        tile = min(step.memory.mlp_tile, step.tokens)
        parts["a tile of the MLP"] = tile * (6 * sizes.mlp_width + 2 * sizes.width) * step.number_bytes
        b = step.number_bytes  # sums, those of the tile before, and the first of three of this one
        parts["sums of weight gradients"] = sizes.mlp_params * (FLOAT + b) + sizes.mlp_params * b // 3
    return parts


def norm_backward(sizes: Sizes, step: Step) -> Parts:
    """The layer at work, in the tiled norm before its MLP: gradients of what it returned, of its input, of the sum."""
    states, tile = sizes.width * step.number_bytes, min(step.memory.mlp_tile or step.tokens, step.tokens)
    parts = {name: step.tokens * size for name, size in graph(sizes, step).items()}
    parts["gradients of states"] = 3 * step.tokens * states
    return parts | {"a tile of the norm": tile * (6 * FLOAT * sizes.width + states)}


def recomputation(sizes: Sizes, step: Step, left: int) -> Parts:
    """The layer with this number, being made again for its backward: queries get their rotary positions.

    Queries, their products with cosines and with sines, and what the latter is made of; what the norm returned is in
    use, whether or not it is kept. Of attention's results that are away those of the layer below come later than this.
    """
    states, own = sizes.width * step.number_bytes, graph(sizes, step)
    own["norms"] -= norm(sizes.width, 1, step)
    own["inputs of projections"] = states
    own["queries, keys, values"] += 3 * sizes.query_width * step.number_bytes
    if step.memory.checkpoint == "full" or ("attention" in step.memory.offload and left > 1):
        own["attention's own results"] = 0
    own["MLP"] = 0
    if keeps_input(step):
        own["input of the layer"] = states
    own["gradients of states"] = states
    return {name: step.tokens * size for name, size in own.items()}


def attention_backward(sizes: Sizes, step: Step) -> Parts:
    """The layer at work, inside the backward of attention: what its MLP kept is gone."""
    b, tokens = step.number_bytes, step.tokens
    states = sizes.width * b
    own = graph(sizes, step)
    own["norms"] -= norm(sizes.width, 1, step)
    own["inputs of projections"] //= 2
    own["MLP"] = 0
    if keeps_input(step):
        own["input of the layer"] = states
    own |= {"gradients of states": states} | attention_kernel(sizes, step)
    return {name: tokens * size for name, size in own.items()}


def attention_kernel(sizes: Sizes, step: Step) -> Parts:
    """Bytes a token inside attention's backward, beside what the graph keeps: in the loop of the ring or behind it."""
    b = step.number_bytes
    queries, keys = sizes.query_width * b, sizes.key_width * b * max(1, step.ulysses // sizes.kv_heads)
    parts = {
        "gradients of attention": 2 * queries + 2 * keys + 12 * sizes.heads,
        "sum of dq in fp32": query_sums(sizes, step),
    }
    if step.ring > 1:
        parts["buffers of the ring"] = buffers_of_ring(step, 2 * keys, 2 * keys // b * FLOAT, queries + 2 * keys)
    if step.ulysses > 1:
        parts["q, k, v, dout of some heads"] = 2 * queries + 2 * keys
    return parts


def query_sums(sizes: Sizes, step: Step) -> int:
    """Bytes a token of dq in fp32 beside dq itself: in a ring of all heads, on one device of those of one launch."""
    sums = FLOAT * sizes.query_width
    if step.ring > 1:
        return sums
    if step.number_bytes == FLOAT or sizes.query_width // sizes.heads > SUMMED_DIM:
        return 0
    groups = max(1, sizes.kv_heads // step.ulysses)
    of_group = sums * step.tokens // groups
    return sums * min(groups, max(1, SUM_BYTES // of_group)) // groups


BUFFERS: dict[str, Callable[[Step], tuple[float, float, float]]] = {
    "ring": lambda step: (1, min(step.ring - 1, 2), min(step.ring - 1, 2)),
    "double": lambda step: (min(step.inner, 3), 3, 3),
    "gather": lambda step: (step.gathered,) * 3,
}
"""Arrangement -> blocks that visit or are to come, gradients being made, and on their way; each in blocks of a rank."""

BUFFERS_ROUNDED: dict[str, Callable[[Step], tuple[float, float]]] = {
    "ring": lambda step: (1, 2),
    "double": lambda step: (2, 2),
    "gather": lambda step: (step.gathered, 2 * step.gathered),
}
"""The last two where they are rounded for their way."""


def buffers_of_ring(step: Step, block: int, sums: int, rounded: int) -> int:
    """Bytes a token of what the backward of a ring holds, in its loop or behind it, where only the own sums are left.

    block: of keys and values; sums: of dk and dv in fp32; rounded: of dq, dk, dv, for which the loop's end makes room
    """
    visiting, made, under_way = BUFFERS[step.arrangement](step)
    if step.transit_bytes < FLOAT:  # what leaves is a copy, so what it was made in is free again
        made, under_way = BUFFERS_ROUNDED[step.arrangement](step)
    in_loop = int(block * (1 + visiting) + sums * (1 + made) + under_way * sums * step.transit_bytes / FLOAT)
    if step.arrangement == "gather":  # what it leaves behind is there from its begin, and it has no own sums beside
        summed = min(1, step.gathered) if step.ring > 2 else 0  # what several ranks send home is summed up first
        return in_loop + int(summed * sums)
    return max(in_loop - rounded, sums)


def loss(sizes: Sizes, step: Step) -> Parts:
    """The output head: states behind the last layer and the last norm, their gradient, and what its loss works with."""
    states = step.tokens * (3 * sizes.width * step.number_bytes + norm(sizes.width, 1, step))
    return {"states at the head": states} | HEADS[step.memory.loss](sizes, step)


def chunked_head(sizes: Sizes, step: Step) -> Parts:
    """Ours: one chunk of logits, the gradient of the head."""
    b, chunk = step.number_bytes, min(step.memory.loss_chunk, step.tokens)
    return {
        "a chunk of logits": chunk * sizes.vocabulary * (2 * FLOAT + b),
        "gradient of the head": trained_head(sizes, step) * (FLOAT + b),
    }


def trained_head(sizes: Sizes, step: Step) -> int:
    """Numbers of the head that get a gradient: none beside adapters."""
    return sizes.head_params if step.trained is None else 0


def last_norm(sizes: Sizes, step: Step) -> Parts:
    """Inside the backward of the norm behind the last layer: its input and five more, in fp32.

    In tiles those of one, with its gradient, beside the input and the gradients of all tokens.
    """
    inside = 6 * FLOAT * sizes.width
    if step.memory.mlp_tile is None:
        return {"inside the last norm": step.tokens * inside}
    states = sizes.width * step.number_bytes
    tile = min(step.memory.mlp_tile, step.tokens)
    return {"states at the last norm": 3 * step.tokens * states, "inside the last norm": tile * (inside + states)}


def liger_head(sizes: Sizes, step: Step) -> Parts:
    """Liger's: logits stay in the model's type; the sum of the head's gradient is rounded when they are gone.

    In fp32 nothing is rounded, and a product of the head's size is made before it is added to the sum.
    """
    b, trained = step.number_bytes, trained_head(sizes, step)
    logits, rounded = liger_chunk(sizes, step.tokens) * sizes.vocabulary * b, trained * b
    return {
        "losses and valid labels": step.tokens * (FLOAT + 1),
        "a chunk of logits": max(logits, rounded) if b < FLOAT else logits + rounded,
        "gradient of the head": trained * FLOAT,
    }


def liger_chunk(sizes: Sizes, tokens: int) -> int:
    """Tokens of Liger's chunk: their logits are about as many numbers as the states of all, to a power of two."""
    share = -(-tokens // -(-sizes.vocabulary // sizes.width))
    return min(1 << (share - 1).bit_length(), tokens)


HEADS: dict[str, Callable[[Sizes, Step], Parts]] = {"chunked": chunked_head, "liger": liger_head}
"""memory.loss -> what the head's loss holds beside states and their gradient."""


def update(sizes: Sizes, step: Step) -> Parts:
    """What the update takes beside weights and gradients: torch's roots of a list; ZeRO 2, and 1 in fp32, a copy."""
    trained = trained_params(sizes, step)
    if step.zero is None or "optimizer" in step.memory.offload:
        return {}
    shards = step.ranks if step.zero else 1
    flat = step.zero == 2 or (step.zero == 1 and step.number_bytes == FLOAT)
    copies = (1 if step.states == 2 else 0) + flat
    return {"update": copies * FLOAT * trained // shards}


def longest(sizes: Sizes, step: Step, fits: Callable[[Prediction], bool], *, multiple: int) -> int:
    """The longest sequence, in tokens, whose step fits; a multiple of `multiple` below 2^31; 0 if none does.

    The number of ranks stays, so tokens of a rank grow with the sequence.
    """
    share = step.tokens / step.sequence

    def works(count: int) -> bool:
        length = count * multiple
        return fits(predict(sizes, replace(step, tokens=int(length * share), sequence=length)))

    low, high, most = 0, 1, MAX_TOKENS // multiple
    while high <= most and works(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low * multiple
