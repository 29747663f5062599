"""[model.rope]: frequencies that are fixed once, the same on every rank and batch, and those of transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
import training
from conftest import error
from transformers import AutoConfig, AutoModelForCausalLM

import ringflash
from train import model, probe
from train.config import ConfigError

ORIGINAL = 24
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.5 * i for i in range(8)]
# type -> its keys in [model.rope]
ROPES = {
    "default": {"theta": 300.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_length": ORIGINAL, "theta": 300.0},
    "yarn": {"factor": 4.0, "original_length": ORIGINAL, "beta_fast": 4.0, "beta_slow": 0.5},
    "llama3": {"factor": 8.0, "original_length": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 3.0, "original_length": ORIGINAL, "short_factor": SHORT, "long_factor": LONG},
}
DOCUMENTS = [0, 5, 41, 60]


def run_of(kind, *, length=training.LENGTH, layout="zigzag", ring=1, family="llama", **changes):
    table = training.LLAMA | changes
    return training.config_of(
        ".",
        mesh=(1, ring, 1),
        model={"architecture": family, "config": table, "rope": {"type": kind, **ROPES[kind]}},
        sequence={"length": length, "layout": layout},
        data={"path": "stdlib"},
    )


def on_a_ring(layout_name):
    """Body: for each type, with and without documents, the error of this rank's logits against one process."""
    errors = {}
    for kind, borders in itertools.product(ROPES, ([0, training.LENGTH], DOCUMENTS)):
        config = run_of(kind, layout=layout_name, ring=4)
        layout = training.join(config).ring.layout(training.LENGTH, cu_seqlens=borders)
        ringflash.hf.register(layout.ring, name=model.ATTENTION)
        got = model.build(config, torch.device("cpu"))(layout.shard(training.tokens()), None, layout)
        torch.manual_seed(config.train.seed)
        alone = model.build_decoder(
            model.config_of(config.model, training.LENGTH),
            dtype=torch.float32,
            attention="eager",
            device=torch.device("cpu"),
        )
        parts = [alone(training.tokens()[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(borders)]
        want = torch.cat([*parts, torch.zeros(1, training.LENGTH - borders[-1], 260)], 1)
        valid = layout.positions < borders[-1]
        errors[kind, borders[-1]] = error(got[:, valid], layout.shard(want)[:, valid])
    return errors


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_R116_logits_of_a_ring_equal_one_process_for_every_type(pool, layout):
    for errors in pool(4)(on_a_ring, layout):
        assert len(errors) == 2 * len(ROPES)
        assert max(errors.values()) <= 1e-5, errors


def theirs(config):
    """The model of transformers with the type as it has it, which looks at the positions of each call."""
    rope = dict(config.model.rope.model_dump(exclude_none=True))
    given = {"rope_type": rope.pop("type"), "rope_theta": rope.pop("theta", 10000.0)}
    original = rope.pop("original_length", None)
    table = training.LLAMA | ({"max_position_embeddings": original} if config.model.rope.type == "dynamic" else {})
    if original is not None and config.model.rope.type != "dynamic":
        given["original_max_position_embeddings"] = original
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **table, rope_parameters=given | rope)).eval()


@pytest.mark.parametrize("length", [ORIGINAL, training.LENGTH])
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers_for_the_length_of_the_run(kind, length):
    config = run_of(kind, length=length)
    want = theirs(config)
    frozen = model.config_of(config.model, length)
    assert frozen.max_position_embeddings >= length
    ours = AutoModelForCausalLM.from_config(frozen).eval()
    ours.load_state_dict(want.state_dict())
    assert error(ours(training.tokens(length)).logits, want(training.tokens(length)).logits) <= 1e-5
    short = ours(training.tokens(8)).logits
    ours(training.tokens(length))
    assert torch.equal(ours(training.tokens(8)).logits, short), "they depend on the batch"
    if kind in ("dynamic", "longrope") and length > ORIGINAL:
        assert error(theirs(config)(training.tokens(8)).logits, short) > 1e-3, "the case tells nothing"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_library_user_s_model_runs_once_its_config_is_frozen(kind):
    ring = ringflash.Ring()
    ringflash.hf.register(ring)
    config = theirs(run_of(kind)).config
    layout = ring.layout(training.LENGTH)
    call = {"position_ids": layout.position_ids[None], "layout": layout, "use_cache": False}
    with pytest.raises(ValueError, match=rf"rope_type='{kind}' .*freeze_rope"):
        AutoModelForCausalLM.from_config(config, attn_implementation="ring")(training.tokens(), **call)
    frozen = ringflash.hf.freeze_rope(config, training.LENGTH)
    assert config.rope_parameters["rope_type"] == kind, "the given one is changed"
    torch.manual_seed(5)
    got = AutoModelForCausalLM.from_config(frozen, attn_implementation="ring")(training.tokens(), **call).logits
    assert error(got, theirs(run_of(kind))(training.tokens()).logits) <= 1e-5


def test_in_gemma_the_layers_with_a_window_keep_theirs():
    config = run_of(
        "dynamic", family="gemma3_text", layer_types=["sliding_attention", "full_attention"], sliding_window=9
    )
    rope = model.config_of(config.model, training.LENGTH).rope_parameters
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    stretched = 2 * training.LENGTH / ORIGINAL - 1
    assert rope["full_attention"]["rope_type"] == "default"
    assert rope["full_attention"]["rope_theta"] == pytest.approx(300.0 * stretched ** (16 / 14))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"factor": 2.0}, "model.rope.factor is given without model.rope.type"),
        ({"type": "yarn", "factor": 2.0}, "model.rope.original_length is missing: .* 'yarn' needs it"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 1.0}, "model.rope.beta_fast is given but .* 'linear' does not"),
        ({"type": "linear", "factor": 0.5}, "factor"),
        ({"type": "ntk"}, "'default', 'linear', 'dynamic', 'yarn', 'llama3' or 'longrope'"),
        ({"type": "longrope", **{k: v for k, v in ROPES["longrope"].items() if k != "factor"}}, "factor is missing"),
        ({"type": "llama3", **ROPES["llama3"], "high_freq_factor": 1.0}, "must be above model.rope.low_freq_factor"),
    ],
)
def test_R110_keys_that_do_not_go_together(rope, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        training.config_of(".", model={"rope": rope})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_probe_s_small_model_has_the_same_type(family):
    """Its heads are narrower, and all of its experts are chosen: a choice could turn over on a rounding."""
    table = training.LLAMA | {"head_dim": 32}
    table |= {"num_experts": 6, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    rope = {"type": "longrope", **ROPES["longrope"], "short_factor": SHORT * 2, "long_factor": LONG * 2}
    config = training.config_of(".", model={"architecture": family, "config": table, "rope": rope})
    small = probe.small_config(model.config_of(config.model, training.LENGTH))
    assert (small.rope_parameters["rope_type"], small.rope_parameters["long_factor"]) == ("longrope", LONG)
    assert getattr(small, "num_experts", None) == getattr(small, "num_experts_per_tok", None)
    alone = model.build_decoder(small, dtype=torch.float32, attention="eager", device=torch.device("cpu"))
    assert alone(torch.arange(64)[None]).logits.isfinite().all()
