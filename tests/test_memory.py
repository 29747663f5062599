"""What `memory` predicts against numbers made by hand and what torch keeps; a run that cannot fit is refused."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import played
import pytest
import test_model_memory
import torch
import training

import ringflash
from ringflash import travel
from train import flops, memory, model, plan
from train.config import Memory, load

ROOT = Path(__file__).resolve().parent.parent
HEAD = ROOT / "docs/results/head.jsonl"
MILLION = 2**20
LLAMA_8B = SimpleNamespace(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=False, model_type="llama",
)  # fmt: skip


def step(**changes):
    switches = Memory(**changes.pop("memory", {}))
    return memory.Step(**{"tokens": MILLION, "sequence": MILLION, "number_bytes": 2, "memory": switches} | changes)


def test_sizes_of_llama_3_8b():
    sizes = memory.sizes_of(LLAMA_8B)
    assert sizes.params == 8_029_995_008, "8,030,261,248, of which 266,240 are norms' weights"
    assert (sizes.query_width, sizes.key_width, sizes.head_norms) == (4096, 1024, False)


def test_a_million_tokens_of_8b_by_hand():
    sizes = memory.sizes_of(LLAMA_8B)
    moved = step(memory={"offload": ["activations", "attention"], "mlp_tile": 4096})
    states, lse = 2**33, 2**27  # bytes of [1M, 4096] in bf16; of [1M, 32] in fp32
    assert memory.host(sizes, moved) == {"hidden states": 32 * states, "attention's results": 32 * (states + lse)}
    half = memory.host(sizes, step(memory={"offload": ["activations"], "checkpoint_every": 3}))
    assert half == {"hidden states": 11 * states}
    work = memory.attention_backward(sizes, moved)
    # x; q, k, v; out; gradients: of the residual, of out and q, of k and v, and the sums of four heads of dq, which
    # share keys; delta and two more
    assert sum(work.values()) == states * (1 + 1.5 + 1 + 1 + 2 + 0.5 + 0.25) + lse * (1 + 3)
    norm = memory.norm_backward(sizes, moved)
    # inputs of both norms; q, k, v; out; gradients: of the residual, of what the norm returned, and of its input
    assert sum(norm.values()) == states * (2 + 1.5 + 1 + 3) + lse + 4096 * 4096 * (6 * 4 + 2)
    again = memory.recomputation(sizes, step(memory={"checkpoint": "full", "mlp_tile": 4096}), 32)
    # x and what its norm returned; the gradient behind; q, its products with cosines and sines, rotated halves; k, v
    assert sum(again.values()) == states * (2 + 1 + 4 + 0.5)
    untiled = memory.graph(sizes, step())
    assert untiled["MLP"] == 4 * 2 * 14336 and untiled["norms"] == 2 * (6 * 4096 + 4)
    assert memory.kept(sizes, moved, 32) == {"hidden states": states, "attention's results": states + lse}
    assert memory.kept(sizes, step(memory={"checkpoint": "full"}), 32) == {"hidden states": 31 * states}


@pytest.mark.parametrize(("tokens", "ulysses"), [(2**15, 1), (2**17, 1), (300_000, 2), (2**20, 1), (2**18, 16)])
@pytest.mark.parametrize("groups", [8, 32, 1])
def test_sums_of_dq_are_those_that_a_launch_makes(tokens, ulysses, groups):
    launch = pytest.importorskip("ringflash.kernels.gluon.launch")
    sizes = memory.sizes_of(SimpleNamespace(**vars(LLAMA_8B) | {"num_key_value_heads": groups}))
    planned = memory.query_sums(sizes, step(tokens=tokens, ulysses=ulysses)) * tokens
    mine = max(1, groups // ulysses)  # those of a rank that has all tokens and some heads
    head_bytes = 4 * tokens * ulysses * 32 // ulysses // mine * 128
    made = max(part.stop - part.start for _, part in launch.parts(1, mine, head_bytes)) * head_bytes
    assert planned == pytest.approx(made, rel=1e-5)
    assert memory.query_sums(sizes, step(tokens=tokens, number_bytes=4)) == 0
    assert memory.query_sums(sizes, step(tokens=tokens, ring=2)) == 4 * 4096
    wide = dataclasses.replace(sizes, heads=16)  # of 256
    assert memory.query_sums(wide, step(tokens=tokens)) == 0
    assert memory.query_sums(wide, step(tokens=tokens, ring=2)) == 4 * 4096


@pytest.mark.parametrize("transit", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "arrangement", "inner"),
    [(2, "ring", None), (3, "ring", None), (5, "ring", None), (2, "gather", None), (4, "gather", None),
     (4, "double", 2), (8, "double", 2), (8, "double", 4)],
)  # fmt: skip
def test_the_buffers_of_a_ring_are_those_that_it_makes(monkeypatch, size, arrangement, inner, transit):
    """Where all rows travel; those of the own block are not buffers of a pool."""
    stock, made = travel.Pool.stock, []

    def noted(pool, count):
        before = len(pool._free)
        stock(pool, count)
        made.extend(x.nbytes for x in pool._free[before:])

    monkeypatch.setattr(travel.Pool, "stock", noted)
    length, heads, width = 16, 2, 16
    q, k, v, dout = (torch.randn(1, size * length, heads, width, dtype=torch.bfloat16) for _ in range(4))
    mesh = {"size": size, "arrangement": arrangement, "inner": inner, "layout": "contiguous"}
    played.attention(q, k, v, dout, **mesh, rotate="keys", transit=transit, causal=False)
    at = step(ring=size, arrangement=arrangement, inner=inner or size, transit_bytes=transit.itemsize)
    block, sums = 2 * 2 * heads * width, 2 * 4 * heads * width
    of_forward = block * (1 + memory.BUFFERS[arrangement](at)[0])
    of_backward = memory.buffers_of_ring(at, block, sums, rounded=0) - sums * (arrangement != "gather")
    planned = size * length * (of_forward + of_backward)
    if arrangement == "gather" and size > 2:  # what comes home is summed up in a tensor that is no buffer
        planned -= size * length * sums
    if arrangement == "gather" and transit != torch.float32:  # what leaves is rounded into tensors of its own
        planned -= size * length * sums * (size - 1) * transit.itemsize // 4
    # in a double ring one buffer less where there are few hops, or where all sums have the same rows
    assert sum(made) == planned if arrangement != "double" else 0.85 * planned <= sum(made) <= planned


def test_a_gather_of_documents_holds_what_others_have_of_one():
    block, sums = 2 * 2 * 1024, 2 * 4 * 1024
    at = functools.partial(step, ring=8, arrangement="gather", tokens=4096)
    assert at().gathered == at(document=10**6).gathered == 7
    assert at(document=1024).gathered == 0.25
    some = memory.buffers_of_ring(at(document=1024), block, sums, rounded=0)
    assert some == block * 1.25 + sums * 1.75, "of all rows a block and its gradients, of a quarter what comes home"


@pytest.mark.parametrize(
    ("zero", "weights", "optimizer", "gradients"),
    [(None, 2, 0, 2), (1, 2, 12 / 4, 4), (2, 2, 12 / 4, 4 / 4), (3, 2 / 4, 12 / 4, 4 / 4)],
)
def test_bytes_a_weight_at_each_stage(zero, weights, optimizer, gradients):
    sizes = memory.sizes_of(LLAMA_8B)
    at = step(zero=zero, ranks=4)
    parts = memory.weights(sizes, at)
    assert parts["weights"] == pytest.approx(weights * sizes.params)
    assert parts.get("optimizer", 0) == pytest.approx(optimizer * sizes.params)
    assert memory.gradients(sizes, at, sizes.params)["gradients"] == pytest.approx(gradients * sizes.params)


@pytest.mark.parametrize("zero", [2, 3])
def test_an_optimizer_in_host_memory_leaves_weights_and_buckets(zero):
    sizes = memory.sizes_of(LLAMA_8B)
    at = step(zero=zero, ranks=4, memory={"offload": ["optimizer"]})
    own = sizes.params // 4  # at ZeRO 3 gradients come into one buffer and go on to another
    assert memory.host(sizes, at) == {
        "optimizer": 16 * own, "weights on their way": 2 * (own if zero == 2 else 10**9),
        "gradients as they came": 4 * own * (zero == 3), "inside the update": 3 * 4 * 2**20,
    }  # fmt: skip
    assert "optimizer" not in memory.weights(sizes, at) and memory.update(sizes, at) == {}
    assert memory.gradients(sizes, at, sizes.params) == {"gradients": 0}
    again = memory.replace(at, accumulation=2)
    assert memory.gradients(sizes, again, 0) == {"gradients": 4 * own * (zero == 2)}, "sums wait on the GPU"
    first = memory.replace(at, zero=1)
    assert memory.gradients(sizes, first, 1000) == {"gradients": 4000}, "all ranks' until the end of the backward"


def test_zero_3_lays_its_weights_out_by_way_of_host_memory():
    sizes = memory.sizes_of(LLAMA_8B)
    assert memory.host(sizes, step(zero=3, ranks=4)) == {memory.LAID_OUT: 2 * sizes.params // 4}
    on_cpu = plan.Limits(None, 10**9, 4)
    assert on_cpu.fits(memory.predict(sizes, step(tokens=64, sequence=64, zero=3))), "a CPU is not asked"
    assert not on_cpu.fits(
        memory.predict(sizes, step(tokens=64, sequence=64, zero=2, memory={"offload": ["optimizer"]}))
    )


def test_the_longest_is_the_last_that_fits():
    sizes = memory.sizes_of(LLAMA_8B)
    at = step(memory={"mlp_tile": 4096, "offload": ["activations"], "checkpoint_every": 4})
    for limit in (60, 141):
        fits = lambda found: found.device_bytes <= limit * 10**9  # noqa: B023, E731
        length = memory.longest(sizes, at, fits, multiple=1024)
        for more, fine in ((0, True), (1024, False)):
            other = memory.predict(sizes, memory.replace(at, tokens=length + more, sequence=length + more))
            assert fits(other) == fine
    assert memory.longest(sizes, at, lambda found: False, multiple=1024) == 0


def test_the_head_of_liger_takes_what_was_measured():
    """The row is of the head alone, so all of it is: gradients, a chunk of logits, losses; 512 bytes are left."""
    row = next(row for row in map(json.loads, HEAD.read_text().splitlines()) if row["head"] == "liger")
    sizes = memory.sizes_of(LLAMA_8B)
    at = step(tokens=row["tokens"], sequence=row["tokens"], memory={"loss": "liger"})
    parts = memory.liger_head(sizes, at)
    assert memory.liger_chunk(sizes, row["tokens"]) == 4096
    assert sum(parts.values()) + 2 * row["tokens"] * row["width"] == pytest.approx(row["peak_bytes"], abs=1024)
    assert memory.loss(sizes, at).items() >= parts.items(), "beside three of the states' size, one their gradient"
    frozen, ours = (head(sizes, memory.replace(at, trained=1000)) for head in (memory.liger_head, memory.chunked_head))
    assert (
        ours["gradient of the head"] == frozen["gradient of the head"] == 0
        and frozen["a chunk of logits"] == 4096 * 128256 * 2
    )
    single = memory.liger_head(sizes, memory.replace(at, number_bytes=4))
    assert single["a chunk of logits"] == 4 * (4096 * 128256 + sizes.head_params)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 1000, 4096, 131072, 131104, MILLION])
def test_the_chunk_of_liger_is_the_one_that_it_takes(tokens):
    """As in its source: cdiv, next_power_of_2, at most all tokens."""
    sizes = memory.sizes_of(LLAMA_8B)
    share, chunk = math.ceil(tokens / math.ceil(sizes.vocabulary / sizes.width)), 1
    while chunk < share:
        chunk *= 2
    assert memory.liger_chunk(sizes, tokens) == min(chunk, tokens)


def test_where_liger_takes_too_much_ours_is_offered():
    liger = planned("sequence.length=4194304", "memory.mlp_tile=4096", "memory.offload=['activations']")
    switches = Memory(loss="liger", mlp_tile=4096, offload=["activations"])
    assert "memory.loss = 'chunked'" in [text for one in liger.knobs(switches) for text in plan.changes(switches, one)]
    assert all(one.loss == "chunked" for one in liger.knobs(liger.config.memory))


def kept_bytes(family, dtype, layers, switches):
    """Bytes that a forward leaves on the device for its backward."""
    config = test_model_memory.config_of(family, num_hidden_layers=layers)
    changes = {
        "memory": Memory(**{"loss_chunk": 5} | switches),
        "model": config.model.model_copy(update={"dtype": dtype}),
    }
    ringflash.hf.register(ringflash.Ring(), name=model.ATTENTION)
    trained = model.build(config.model_copy(update=changes), torch.device("cpu"))
    layout = ringflash.Ring().layout(training.LENGTH)
    others = {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    kept: dict[int, int] = {}

    def pack(x):
        if id(x) not in others:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    parameters = {parameter.untyped_storage().data_ptr() for parameter in trained.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = trained(*test_model_memory.batch(), layout)
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in others]
    kept |= {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
    assert loss.requires_grad
    return sum(size for place, size in kept.items() if place not in parameters)


SWITCHES = [
    {"checkpoint": "none"}, {"checkpoint": "none", "mlp_tile": 9}, {"checkpoint": "full"}, {"checkpoint": "selective"},
    {"checkpoint": "selective", "checkpoint_every": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def caches():
    """What a first call keeps for the next ones."""
    kept_bytes("llama", "float32", 2, {})


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "bfloat16")])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_what_layers_keep_is_what_torch_keeps(family, dtype, switches):
    few, many = (kept_bytes(family, dtype, layers, switches) for layers in (2, 6))
    config = test_model_memory.config_of(family)
    sizes = memory.sizes_of(model.config_of(config.model, training.LENGTH))
    at = step(tokens=training.LENGTH, number_bytes=2 if dtype == "bfloat16" else 4, memory=switches)
    held = [sum(memory.kept(sizes, at, layers, inside=False).values()) for layers in (2, 6)]
    assert many - few == held[1] - held[0]


def config_of(*overrides):
    return load(ROOT / "configs/llama3_8b_128k.toml", list(overrides))


def planned(*overrides):
    config = config_of(*overrides)
    return plan.Plan(config, model.config_of(config.model, config.sequence.length), config.world_size)


def limits(device_gb, host_gb):
    return plan.Limits(device_gb * plan.GB, host_gb * plan.GB, 8)


def test_a_run_that_cannot_fit_is_refused_with_part_length_and_knob():
    rates = flops.RATES["H200"]
    assert planned().refusal(limits(141, 1900), rates) == ""
    long = planned("sequence.length=2097152")
    said = long.refusal(limits(141, 1900), rates)
    longest = long.longest(long.step(), limits(141, 1900))
    assert "sequence.length = 2097152 does not fit: the backward of MLP in its first layer takes" in said
    assert "most of it is attention's results, 67.6 GB" in said and f"The longest that fits is {longest}; with" in said
    assert "it fits, and a step takes about" in said
    assert planned(f"sequence.length={longest}").refusal(limits(141, 1900), rates) == ""
    assert "more ranks (parallel.ring) are needed" in planned("sequence.length=16777216").refusal(
        limits(80, 200), rates
    )


def test_host_memory_is_checked_for_what_is_offloaded():
    rates = flops.RATES["H200"]
    long = planned("sequence.length=2097152", "memory.offload=['activations','attention']", "memory.mlp_tile=4096")
    assert long.refusal(limits(141, 1900), rates) == ""
    said = long.refusal(limits(141, 1000), rates)
    assert "8 processes take" in said and "of host memory, the machine has 1000.0 GB" in said


def test_the_knobs_that_are_offered_make_it_fit():
    rates, room = flops.RATES["H200"], limits(80, 400)
    said = planned("sequence.length=1048576").refusal(room, rates)
    knobs = "'activations' in memory.offload and memory.mlp_tile = 4096"
    assert f"with {knobs} it fits, and a step takes about 1% longer" in said
    turned = "memory.mlp_tile=4096", "memory.offload=['activations']"
    assert planned("sequence.length=1048576", *turned).refusal(room, rates) == ""


def test_what_is_offered_is_what_leads_there_and_can_be_written():
    before = planned("memory.offload=['activations','attention']").config.memory
    after = before.model_copy(update={"checkpoint": "full", "checkpoint_every": 4, "offload": ["activations"]})
    words = ["memory.checkpoint = 'full'", "memory.checkpoint_every = 4", "no 'attention' in memory.offload"]
    assert sorted(plan.changes(before, after)) == sorted(words)
    table = planned("sequence.length=1048576")
    for written, step in table.around():
        assert not ("attention" in step.memory.offload and step.memory.checkpoint == "full")
        assert len({text.split(" = ")[0] for text in written}) == len(written), "a key is said once"


def test_where_no_length_fits_it_says_so():
    said = planned("sequence.length=1048576").refusal(limits(10, 1900), flops.RATES["H200"])
    assert "No length fits as it is; " in said and "on each GPU, which has 10.0 GB" in said


@pytest.mark.parametrize("word", ["nan", "-5", "0", "much", "1e300"])
def test_a_machine_has_a_positive_number_of_gigabytes(word, capsys):
    with pytest.raises(SystemExit):
        plan.main(["run.toml", f"--device-gb={word}"])
    assert f"--device-gb: {word} must be a positive number of gigabytes" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_of_few_layers_that_are_asked_one_holds_the_most_of_all(checkpoint, zero):
    draw = random.Random(f"{checkpoint}{zero}")
    for _ in range(200):
        layers, params = draw.randint(1, 40), draw.choice([1, 1000, 10**6, 10**9])
        sizes = memory.Sizes(
            layers=layers, width=draw.choice([1, 64, 4096]), query_width=64, key_width=32, mlp_width=128, heads=1,
            kv_heads=1, vocabulary=draw.choice([1, 1000, 10**6]), layer_params=params, mlp_params=params,
            embeddings=draw.choice([1, 2]), head_norms=False,
        )  # fmt: skip
        offload = [kind for kind in ("activations", "attention", "optimizer") if draw.random() < 0.4]
        switches = Memory(checkpoint=checkpoint, checkpoint_every=draw.randint(1, layers), offload=offload)
        at = memory.Step(
            tokens=draw.choice([1, 100, 10**5]), sequence=10**5, number_bytes=draw.choice([2, 4]), memory=switches,
            zero=zero, trained=draw.choice([None, 0, 1, sizes.params // 2, sizes.params]),
            accumulation=draw.choice([1, 2]),
        )  # fmt: skip
        held = [sum(memory.held(sizes, at, left).values()) for left in range(layers, 0, -1)]
        asked = [held[layers - left] for left in memory.turns(sizes, at)]
        assert max(asked) == max(held), (sizes, at)


def test_a_deep_model_is_planned_by_few_of_its_layers():
    deep = planned("model.config.num_hidden_layers=65536", "memory.checkpoint_every=64")
    assert len(memory.turns(deep.sizes, deep.step())) < 50
    assert "does not fit" in deep.refusal(limits(141, 1900), flops.RATES["H200"])


def test_a_step_of_many_sequences_is_counted_once():
    """One second a sequence more, or memory for each, and `plan` would not answer."""
    one, many = (planned(f"train.global_batch={count}") for count in (1, 10**12))
    times = [sum(plan_.seconds(plan_.step(), flops.RATES["H200"]).values()) for plan_ in (one, many)]
    assert times[1] == pytest.approx(10**12 * times[0])


def test_the_longest_is_a_length_that_is_accepted():
    roomy = planned("parallel.ring=6", "launch.processes_per_node=6", "sequence.length=131088")
    longest = roomy.longest(roomy.step(), limits(10**9, 10**9))
    assert 2**31 - 2 * 128 * 2 * 6 < longest < 2**31 and longest % (128 * 2 * 6) == 0


def test_check_refuses_before_anything_is_allocated():
    config = config_of("sequence.length=4194304", "memory.device_gb=141")
    hf = model.config_of(config.model, config.sequence.length)
    with pytest.raises(ValueError, match=r"sequence.length = 4194304 does not fit: .* has 141.0 GB"):
        plan.check(config, hf, 8, None)
    plan.check(config_of(), hf, 8, None)


def in_bytes(line):
    """The size or time at the end of a line of the table."""
    number, unit = line.split()[-2:]
    return float(number) * {"GB": 1e9, "MB": 1e6, "kB": 1e3, "s": 1, "ms": 1e-3, "us": 1e-6}[unit]


def test_the_table_of_the_command_adds_up(capsys):
    assert plan.main([str(ROOT / "configs/llama3_8b_128k.toml"), "--host-gb", "1900"]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("host"))]
    total = in_bytes(lines[0].partition(" of ")[0])
    assert sum(map(in_bytes, parts)) == pytest.approx(total, abs=5e7 * len(parts))
    words = [str(ROOT / "configs/llama3_8b_128k.toml"), "--set", "sequence.length=4194304", "--host-gb", "100"]
    assert plan.main(words) == 2
    assert "does not fit" in capsys.readouterr().err


def test_a_tiny_run_is_told_in_small_units(capsys):
    words = [str(ROOT / "configs/demo.toml"), "--set", "memory.offload=['activations']"]
    assert plan.main(words) == 0
    lines = {line[:15].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert " MB of each of 4 processes" in lines["host memory"] and " us at the rates" in lines["step"]


def test_a_plan_of_several_nodes_needs_no_address(capsys):
    words = [str(ROOT / "configs/llama3_8b_128k.toml"), "--host-gb", "1900", "--set", "launch.nodes=2"]
    assert plan.main([*words, "--set", "parallel.ring=16"]) == 0
    assert "of each of 8 processes" in capsys.readouterr().out
    assert plan.main([*words, "--set", "sequence.length=0"]) == 2, "what else is wrong is still refused"
    assert "sequence.length" in capsys.readouterr().err


def test_keeping_the_states_of_fewer_than_one_layer_is_refused():
    with pytest.raises(ValueError, match=r"checkpoint_every = 33 is more than the model's 32 layers: 1 to 32 is"):
        planned("memory.checkpoint_every=33")
    assert planned("memory.checkpoint_every=32").sizes.layers == 32


def test_host_memory_may_be_said_where_the_machine_says_too_little(monkeypatch):
    monkeypatch.setattr(plan.os, "sysconf", lambda name: 1000)
    long = "sequence.length=131072", "memory.offload=['activations']", "memory.device_gb=141"
    config = config_of(*long)
    hf = model.config_of(config.model, config.sequence.length)
    with pytest.raises(ValueError, match=r"the machine has 1\.0 MB"):
        plan.check(config, hf, 8, None)
    plan.check(config_of(*long, "memory.host_gb=1900"), hf, 8, None)
