"""transformers models over a ring against themselves with their own eager attention on one process."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import TOLERANCE, error
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ringflash

SEQ = 128
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 24
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# name: (family, what differs from SIZES)
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3, "head_dim": 256, "num_key_value_heads": 1, "query_pre_attn_scalar": 100,
            "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),  # the window in two of three layers, the largest head dimension, its own scale
    "gemma2": (
        "Gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
    ),  # capped scores, and a window in every second layer
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": PLAIN_ROPE},
    ),  # sinks; both experts for every token, since a choice between close scores turns over on a rounding
}  # fmt: skip
DOCUMENTS = [0, 5, 6, 70, 121]  # one of a single token, one over shard borders, 7 tokens of padding
# name: (ranks, layout, ulysses, borders of documents)
RINGS = {
    "one": (1, "zigzag", 1, None),
    "one-documents": (1, "zigzag", 1, DOCUMENTS),
    "zigzag": (4, "zigzag", 1, None),
    "zigzag-documents": (4, "zigzag", 1, DOCUMENTS),
    "balanced-documents": (4, "balanced", 1, DOCUMENTS),
    "ulysses-documents": (4, "contiguous", 2, DOCUMENTS),
}


def make(name: str, **changes):
    """A small random model in training mode, the same on every rank, with its own eager attention.

    name: of MODELS, or a family
    """
    family, special = MODELS.get(name, (name, {}))
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**{**SIZES, **special, **changes}, attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # the family's own start is so small that attention hardly matters
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def on_ring(name: str, ring: ringflash.Ring, **changes):
    ringflash.hf.register(ring)
    model = make(name, **changes)
    model.set_attn_implementation("ring")
    return model


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [1, S] and the gradient of the loss with respect to the logits, [1, S, V]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (1, SEQ), generator=generator), torch.randn(1, SEQ, VOCAB, generator=generator)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@functools.cache  # in each process, for the rings that share it
def by_document(name: str, borders: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The reference in fp64: each document alone through the model's own attention. Logits [1, borders[-1], V]."""
    model = make(name).to(torch.float32 if name == "gpt_oss" else torch.float64)  # grouped products know no fp64
    ids, dlogits = sample()
    logits = []
    for start, end in itertools.pairwise(borders):
        logits.append(model(ids[:, start:end]).logits)
        (logits[-1] * dlogits[:, start:end]).sum().backward()
    return torch.cat(logits, 1).detach(), gradients(model)


def compare(name: str, layout_name: str, ulysses: int, borders: list[int] | None, call: str) -> dict[str, float]:
    """Errors of the logits and of every parameter's gradient, on one rank. call: which arguments the model is given."""
    ring = ringflash.Ring(layout=layout_name, ulysses=ulysses)
    layout = ring.layout(SEQ, cu_seqlens=borders)
    model = on_ring(name, ring)
    ids, dlogits = sample()
    given = {
        "layout": {"position_ids": layout.position_ids[None], "layout": layout},
        "positions": {"position_ids": layout.positions[None]},
    }[call]
    valid = (borders or [0, SEQ])[-1]
    dlogits[:, valid:] = 0
    local = model(layout.shard(ids), **given).logits
    (local * layout.shard(dlogits)).sum().backward()
    logits = layout.unshard(local.detach())[:, :valid]
    got = gradients(model)
    if ring.group is not None:
        for grad in got.values():
            dist.all_reduce(grad)
    want_logits, want = by_document(name, tuple(borders or (0, SEQ)))
    return {"logits": error(logits, want_logits)} | {key: error(got[key], want[key]) for key in want}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", MODELS)
def test_R34_R116_a_model_over_a_ring_is_the_model_on_one_process(name, ring, pool):
    size, *rest = RINGS[ring]
    results = [compare(name, *rest, "layout")] if size == 1 else pool(size)(compare, name, *rest, "layout")
    for errors in results:
        # the model around attention rounds in fp32 too: its own eager attention has up to 3e-6 here
        assert max(errors.values()) <= TOLERANCE[torch.float32], errors


def test_without_layout_the_ring_s_own_holds(pool):
    for errors in pool(4)(compare, "llama", "zigzag", 1, None, "positions"):
        assert max(errors.values()) <= TOLERANCE[torch.float32], errors


def counted(calls: dict[str, int], which: str):
    """ringflash.ring.forward or backward, counting its calls."""
    run = getattr(ringflash.ring, which)

    def body(*args, **kwargs):
        calls[which] += 1
        return run(*args, **kwargs)

    return body


def ring_calls(name: str, saving: str) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """How often one step runs the ring on this rank, and the gradients of its own loss."""
    ring = ringflash.Ring()
    layout = ring.layout(SEQ, cu_seqlens=DOCUMENTS)
    model = on_ring(name, ring)
    if saving != "off":
        policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.ringflash.attention.default])
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False} | ({"context_fn": policy} if saving == "selective" else {}))
    calls = {"forward": 0, "backward": 0}
    with pytest.MonkeyPatch.context() as patch:
        for which in calls:
            patch.setattr(ringflash.ring, which, counted(calls, which))
        ids, dlogits = sample()
        logits = model(layout.shard(ids), position_ids=layout.position_ids[None], layout=layout).logits
        (logits * layout.shard(dlogits)).sum().backward()
    return calls, gradients(model)


def checkpointed(name: str) -> dict[str, tuple[dict[str, int], bool]]:
    """For each way of saving: the calls, and whether all gradients are bitwise those without checkpointing."""
    _, want = ring_calls(name, "off")
    result = {}
    for saving in ("off", "full", "selective"):
        calls, got = ring_calls(name, saving)
        result[saving] = calls, all(torch.equal(got[key], want[key]) for key in want)
    return result


@pytest.mark.parametrize("name", MODELS)
def test_R33_checkpointing_repeats_the_ring_only_without_the_saving_policy(name, pool):
    layers = MODELS[name][1].get("num_hidden_layers", SIZES["num_hidden_layers"])
    for result in pool(4)(checkpointed, name):
        for saving, times in {"off": 1, "full": 2, "selective": 1}.items():
            assert result[saving] == ({"forward": times * layers, "backward": layers}, True), saving


def wrong_positions(call: str) -> str:
    """What the first layer says on this rank."""
    ring = ringflash.Ring()
    layout = ring.layout(SEQ)
    given = {
        "neither": {},
        "no layout": {"position_ids": layout.positions[None] + 1},
        "documents but no layout": {"position_ids": ring.layout(SEQ, cu_seqlens=DOCUMENTS).position_ids[None]},
        "no positions": {"layout": layout},
        "positions of another ring": {"layout": layout, "position_ids": torch.arange(SEQ // ring.size)[None]},
    }[call]
    with pytest.raises(ValueError) as caught:
        on_ring("llama", ring)(layout.shard(sample()[0]), **given)
    return str(caught.value)


@pytest.mark.parametrize(
    "call", ["neither", "no layout", "documents but no layout", "no positions", "positions of another ring"]
)
def test_wrong_positions_are_refused_on_every_rank(call, pool):
    for message in pool(4)(wrong_positions, call):
        assert message.startswith("layer 0 (LlamaAttention): ") and "position_ids" in message


@pytest.fixture
def ring() -> ringflash.Ring:
    return ringflash.Ring()


def test_the_plain_call_of_the_contract_with_every_default(ring):
    layout = ring.layout(SEQ)
    ids, _ = sample()
    model = on_ring("llama", ring, use_cache=True)
    got = model(layout.shard(ids), position_ids=layout.position_ids[None], layout=layout).logits
    assert error(got, make("llama")(ids).logits) <= TOLERANCE[torch.float32]


def test_labels_shifted_before_the_cut_reach_the_model_s_loss(ring):
    layout = ring.layout(SEQ)
    ids, _ = sample()
    shifted = torch.cat((ids[:, 1:], torch.full((1, 1), -100)), 1)
    labels = {"labels": layout.shard(ids), "shift_labels": layout.shard(shifted)}
    model = on_ring("llama", ring)
    got = model(layout.shard(ids), position_ids=layout.position_ids[None], layout=layout, **labels).loss
    assert error(got, make("llama")(ids, labels=ids).loss) <= TOLERANCE[torch.float32]


def test_a_padding_mask_without_zeros_is_let_pass(ring):
    ids, _ = sample()
    model = on_ring("mistral", ring)
    mask = torch.ones(1, SEQ, dtype=torch.int64)
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it from the hidden states
def test_layers_compile_into_one_graph_that_new_documents_do_not_rebuild(ring):
    ids, _ = sample()
    model = on_ring("llama", ring, num_hidden_layers=1)

    def run(borders: list[int]) -> torch.Tensor:
        layout = ring.layout(SEQ, cu_seqlens=borders)
        return model(ids, position_ids=layout.position_ids[None], layout=layout).logits

    batches = ([0, 50, SEQ], DOCUMENTS, [0, 1, 2, 3, 4, 90, SEQ])
    want = [run(borders) for borders in batches]
    graphs = []
    model.model.layers[0].compile(fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for borders, expected in zip(batches, want, strict=True):
        assert torch.equal(run(borders), expected)
    assert len(graphs) == 1
