"""train/flops.py: counted by hand, and against the models of transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from train import flops
from train.flops import ModelShape, StepFlops

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 7, "head_dim": 16},
    "gemma3_text": {"sliding_window": 5, "head_dim": 32},
}
WINDOWS = {
    "llama": (None,) * 3,
    "qwen2": (None,) * 3,
    "qwen3": (None,) * 3,
    "mistral": (7,) * 3,
    "gemma3_text": (5, None, 5),
}


def tiny(name: str):
    extra = dict(ARCHITECTURES.get(name, {}))
    if name == "gemma3_text":
        extra["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return AutoConfig.for_model(
        name,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **extra,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_matmul_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(name))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert flops.describe(tiny(name)).matmul_params == linear


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_windows_are_those_of_the_layers(name):
    shape = flops.describe(tiny(name))
    assert shape.windows == WINDOWS[name]
    assert (shape.heads, shape.head_dim) == (4, ARCHITECTURES[name].get("head_dim", 16))


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("length", [0, 1, 2, 8, 9])
def test_visible_pairs_are_those_of_the_mask(length, window):
    mask = torch.ones(length, length).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    assert flops.visible_pairs(length, window) == int(mask.sum())


def test_documents_count_by_their_own_length():
    shape = ModelShape(matmul_params=1000, heads=2, head_dim=16, windows=(None, 3))
    # 12 * 2 * 16 = 384 FLOPs a pair; document of 4: 10 pairs in full and 9 in the window; of 2: 3 and 3
    assert flops.step_flops(shape, [4, 2]) == StepFlops(6 * 1000 * 6, 384 * (10 + 9 + 3 + 3))
    assert flops.step_flops(shape, []) == StepFlops(0, 0)


def test_documents_may_be_counted_by_their_length():
    shape = ModelShape(matmul_params=10, heads=2, head_dim=16, windows=(None, 4, None))
    assert flops.step_flops(shape, {7: 3, 5: 1}) == flops.step_flops(shape, [7, 7, 5, 7])


def test_one_long_document_is_half_of_full_attention():
    shape = ModelShape(matmul_params=1, heads=32, head_dim=128, windows=(None,) * 32)
    length = 2**20
    full = 12 * 32 * 128 * 32 * length**2
    assert flops.step_flops(shape, [length]).attention / full == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_of_experts_those_that_a_token_goes_through_count(changes):
    config = tiny("qwen3_moe")
    config.update(changes | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = list(model.modules())
    want = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
    want += sum(m.weight.numel() for m in modules if type(m).__name__ == "Qwen3MoeTopKRouter")
    experts = [m for m in modules if type(m).__name__ == "Qwen3MoeExperts"]
    assert len(experts) == {"": 3, "mlp_only_layers": 2, "decoder_sparse_step": 1}["".join(changes)]
    want += sum(p.numel() * 2 // 8 for m in experts for p in m.parameters())
    assert flops.describe(config).matmul_params == want


def test_other_experts_and_unknown_layers_are_refused():
    config = tiny("gemma3_text")
    config.num_experts = 8
    with pytest.raises(ValueError, match="num_experts = 8"):
        flops.describe(config)
    config.num_experts = 0
    config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="linear_attention"):
        flops.describe(config)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_the_peak_of_a_known_card(device, peak):
    assert flops.peak_tflops(device, "bfloat16", None) == (peak, None)


def test_an_unknown_peak_says_why():
    assert flops.peak_tflops("cpu", "float32", 0.5) == (0.5, None)
    peak, reason = flops.peak_tflops("cpu", "float32", None)
    assert peak is None and "'cpu'" in reason and "metrics.peak_tflops" in reason
    peak, reason = flops.peak_tflops("NVIDIA H200", "float32", None)
    assert peak is None and "float32" in reason and "metrics.peak_tflops" in reason
