"""train/config: what a run may be told, and how it refuses the rest in one sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.__main__ import launch as launch_command
from ringflash import arguments
from train.config import Batch, Config, ConfigError, architecture, check_paths, load, pretrained

REPO = Path(__file__).resolve().parent.parent
DEMO = REPO / "configs" / "demo.toml"
LLAMA = REPO / "configs" / "llama3_8b_128k.toml"


def demo(*overrides: str):
    return load(DEMO, overrides)


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_loads(path):
    config = load(path)
    assert config.train.name == path.stem
    assert config.data_parallel(config.world_size) * config.sequence_parallel == config.world_size


def test_a_value_is_toml_and_a_bare_word_is_a_string():
    config = demo(
        "data.path=/tmp/some text", "optimizer.lr=1e-2", "optimizer.betas=[0, 0.5]", "model.config.id2label.y=3"
    )
    assert (config.data.path, config.optimizer.lr, config.optimizer.betas) == ("/tmp/some text", 1e-2, [0.0, 0.5])
    assert config.model.config["id2label"] == {"y": 3}
    assert demo('train.name="7"').train.name == "7"


@pytest.mark.parametrize("section", Config.model_fields)
def test_every_key_says_what_it_means(section):
    silent = [key for key, info in Config.model_fields[section].annotation.model_fields.items() if not info.description]
    assert not silent, f"[{section}]: write a docstring under {silent}"


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        demo().train.steps = 3


def test_R109_a_number_stays_a_number():
    assert demo("optimizer.lr=1e-5", "optimizer.min_lr=0").optimizer.lr == 1e-5
    assert isinstance(demo("optimizer.lr=1").optimizer.lr, float)


WRONG_TYPES = {
    "optimizer.lr=fast": ("optimizer.lr", "'fast'", "a number"),
    "optimizer.lr='1e-5'": ("optimizer.lr", "'1e-5'", "a number"),
    "optimizer.lr=true": ("optimizer.lr", "True", "a number"),
    "optimizer.lr=nan": ("optimizer.lr", "nan", "a finite number"),
    "parallel.ring=2.5": ("parallel.ring", "2.5", "an integer"),
    "parallel.ring=no": ("parallel.ring", "'no'", "an integer"),
    "parallel.ring='4x'": ("parallel.ring", "'4x'", "an integer"),
    "parallel.ring=true": ("parallel.ring", "True", "an integer"),
    "data.shuffle=1": ("data.shuffle", "1", "a boolean"),
    "data.path=3": ("data.path", "3", "a string"),
}


@pytest.mark.parametrize("override", WRONG_TYPES)
def test_R109_a_wrong_type_names_key_value_and_type(override):
    key, value, wanted = WRONG_TYPES[override]
    with pytest.raises(ConfigError) as refusal:
        demo(override)
    assert str(refusal.value).startswith(f"{key} = {value} ")
    assert wanted in str(refusal.value)


UNKNOWN_KEYS = {
    "parallel.ulises=4": "did you mean parallel.ulysses?",
    "sequence.lenght=8192": "did you mean sequence.length?",
    "train.length=8192": "did you mean sequence.length?",
    "data.sources=[{path='x', format='jsonl', wieght=2}]": "did you mean data.sources.weight?",
    "data.sources=[{path='x', format='jsonl', length=2}]": "did you mean sequence.length?",
    "data.fromat=text": "did you mean data.sources.format?",
    "optimizer.zero=3": "did you mean parallel.zero?",
    "model.layuot=zigzag": "did you mean sequence.layout?",
    "optimiser.lr=1": "[optimiser] is not a section: did you mean [optimizer]?",
    "parallel.sequence_parallel_sise=4": "[parallel] has ring, ulysses, data, zero",
    "nothing_like_it.x=4": "there are model, data,",
}


@pytest.mark.parametrize("override", UNKNOWN_KEYS)
def test_R110_an_unknown_or_misplaced_key_is_refused_with_the_nearest(override):
    with pytest.raises(ConfigError) as refusal:
        demo(override)
    assert override.split("=")[0].split(".")[0] in str(refusal.value)
    assert UNKNOWN_KEYS[override] in str(refusal.value)


def test_R110_a_key_outside_any_section(tmp_path):
    path = tmp_path / "flat.toml"
    path.write_text("ring = 4\n" + DEMO.read_text())
    with pytest.raises(ConfigError, match=r"\[ring\] is not a section: did you mean parallel\.ring\?"):
        load(path)


def eight(*overrides: str):
    """World 8 in rings of 4, so 2 data replicas; no documents, so that a micro-batch may be above 1."""
    return load(DEMO, ["launch.processes_per_node=8", "data.document_mask=false", *overrides])


BATCHES = {
    (16, 2, 4): Batch(16, 2, 4),
    (None, 2, 4): Batch(16, 2, 4),
    (16, None, 4): Batch(16, 2, 4),
    (16, 2, None): Batch(16, 2, 4),
    (16, None, None): Batch(16, 1, 8),
    (None, 3, None): Batch(6, 3, 1),
    (None, None, 3): Batch(6, 1, 3),
    (None, None, None): Batch(2, 1, 1),
}
DISAGREEING = [(64, 2, 4), (8, 2, 4), (15, 2, None), (15, None, 4), (15, None, None), (2, 2, None), (2, None, 4)]


def batch_lines(sizes) -> str:
    return "".join(f"{name} = {n}\n" for name, n in zip(Batch._fields, sizes, strict=True) if n is not None)


@pytest.fixture
def with_batch(tmp_path):
    def make(sizes):
        path = tmp_path / "batch.toml"
        path.write_text(DEMO.read_text().replace("global_batch = 1 ", batch_lines(sizes) + "#"))
        return load(path, ["launch.processes_per_node=8", "data.document_mask=false"])

    return make


@pytest.mark.parametrize("sizes", BATCHES, ids=str)
def test_R113_the_missing_batch_size_is_derived(with_batch, sizes):
    assert with_batch(sizes).batch(8) == BATCHES[sizes]


@pytest.mark.parametrize("sizes", DISAGREEING, ids=str)
def test_R113_batch_sizes_that_disagree_are_listed(with_batch, sizes):
    with pytest.raises(ConfigError) as refusal:
        with_batch(sizes)
    for name, size in zip(Batch._fields, sizes, strict=True):
        assert f"train.{name} = {'left out' if size is None else size}" in str(refusal.value)
    assert "data = 2 (world 8 / (ring 4 * ulysses 1))" in str(refusal.value)


def test_R113_a_world_that_does_not_divide():
    with pytest.raises(ConfigError, match=r"6 processes does not divide by parallel\.ring = 4"):
        demo("launch.processes_per_node=6")


@pytest.mark.parametrize(("ring", "world", "tokens"), [(1, 1, 4096), (2, 2, 4096), (4, 4, 4096), (2, 4, 8192)])
def test_R90_ranks_of_one_ring_share_their_tokens(ring, world, tokens):
    overrides = ["sequence.length=1024", f"parallel.ring={ring}", f"launch.processes_per_node={world}"]
    config = demo(*overrides, f"train.global_batch={world // ring}")
    assert 4 * config.batch(world).global_batch * config.sequence.length == tokens


REFUSED = {
    # a ring that does not fit the world
    "parallel.ring=8": ("ring = 8", "4 processes"),
    "parallel.ulysses=2": ("ulysses = 2", "8 ranks", "4 processes"),
    "parallel.data=2": ("data = 2", "8 ranks", "4 processes"),
    "parallel.zero=4": ("parallel.zero = 4", "less than or equal to 3"),
    "parallel.arrangement=star": ("'star'", "'ring', 'double' or 'gather'"),
    "parallel.arrangement=double": ("'double'", "parallel.topology"),
    "parallel.topology=3": ("parallel.topology = 3", "4 ranks", "parallel.ulysses = 1"),
    "parallel.topology=racks": ("parallel.topology = 'racks'", "an integer or 'hosts'"),
    "parallel.transit=float16": ("'float16'", "'float32' or 'bfloat16'"),
    # lengths
    "sequence.length=8190": ("8190", "divide by 8", "'zigzag'", "8192"),
    "sequence.length=0": ("sequence.length = 0", "greater than or equal to 1"),
    "sequence.layout=spiral": ("'spiral'", "'contiguous', 'zigzag', 'striped', 'balanced' or 'auto'"),
    # the model
    "model.architecture=gpt2": ("'gpt2'", "'llama'"),
    "model.config.vocab_size=257": ("vocab_size = 257", "'bytes'", "258"),
    "model.config.num_key_value_heads=3": ("num_attention_heads = 4", "num_key_value_heads = 3"),
    "model.config.hidden_size='192'": ("model.config.hidden_size = '192'", "an integer"),
    "model.config=3": ("model.config = 3", "a dictionary"),
    "model.config.hidden_size=192": ("hidden_size / num_attention_heads = 48", "16, 32, 64, 96"),
    "model.config.head_dim=80": ("model.config.head_dim = 80", "16, 32, 64, 96"),
    "model.config.pad_token_id=264": ("pad_token_id = 264", "vocab_size = 264"),
    "model.config.head_dim='x'": ("model.config.head_dim = 'x'", "16, 32, 64, 96"),
    "model.config.attention_dropout=0.1": ("attention_dropout = 0.1", "leave it out"),
    "sequence.length=4294967296": ("sequence.length = 4294967296", "2147483647"),
    "data.pattern=/a/*.txt": ("data.pattern = '/a/*.txt'", "matches"),
    "data.pattern=": ("data.pattern", "matches"),
    "model.architecture=qwen3": ("model.config.head_dim is missing", "qwen3"),
    "model.config.vocab_size=1000000000000": ("vocab_size = 1000000000000", "an integer in [1, 2147483647]"),
    "model.config.num_hidden_layers=1000000": ("num_hidden_layers = 1000000", "an integer in [1, 65536]"),
    "model.config.num_hidden_layers=true": ("num_hidden_layers = True", "an integer in [1, 65536]"),
    "model.config.hidden_act=sulu": ("hidden_act = 'sulu'", "one of gelu", "silu"),
    "model.config.sliding_window=0": ("sliding_window = 0", "an integer in [1, 2147483647]"),
    "model.config.sliding_window=-3": ("sliding_window = -3", "an integer in [1, 2147483647]"),
    "model.config.sliding_window=2.5": ("sliding_window = 2.5", "an integer in [1, 2147483647]"),
    "model.config.max_position_embeddings=-5": ("max_position_embeddings = -5", "an integer in [1, 2147483647]"),
    "model.config.rms_norm_eps=-1e-6": ("rms_norm_eps = -1e-06", "a float between 0 and 1"),
    "model.config.rms_norm_eps=1": ("rms_norm_eps = 1", "a float between 0 and 1"),
    "model.config.attention_bias=1": ("attention_bias = 1", "a boolean"),
    "model.config.query_pre_attn_scalar=-4": ("query_pre_attn_scalar = -4", "an integer in [1, 2147483647]"),
    "model.config.decoder_sparse_step=0": ("decoder_sparse_step = 0", "an integer in [1, 2147483647]"),
    "model.config.layer_types=['full_attention', 'chunked_attention']": ("'chunked_attention'", "'sliding_attention'"),
    "model.config.rope_parameters=3": ("rope_parameters = 3", "a table with rope_type"),
    "model.config.rope_parameters={rope_type='foo'}": ("rope_parameters.rope_type = 'foo'", "linear, dynamic, yarn"),
    "model.config.rope_parameters={full_attention={rope_type='foo'}}": ("full_attention.rope_type = 'foo'", "linear"),
    "model.config.rope_parameters={rope_type='linear'}": ("rope_parameters.factor is missing", "'linear'"),
    "model.config.rope_parameters={rope_theta=-1}": ("rope_parameters.rope_theta = -1", "a positive number"),
    "model.config.partial_rotary_factor=2": ("model.config.partial_rotary_factor = 2", "1.0, since these families"),
    "model.config.rope_scaling={type='su'}": ("rope_scaling.rope_type = 'su'", "longrope"),
    "memory.checkpoint_every=3": ("memory.checkpoint_every = 3", "the model's 2 layers", "1 to 2"),
    "model.config.dtype=float16": ("model.config.dtype = 'float16'", "model.dtype says it"),
    "model.config.model_type=llama": ("model.config.model_type = 'llama'", "model.architecture says it"),
    # the optimizer
    "optimizer.momentum=0.9": ("optimizer.momentum", "'adamw'"),
    "optimizer.name=sgd": ("optimizer.betas", "'sgd'"),
    "optimizer.schedule=constant": ("optimizer.min_lr", "'constant'"),
    "optimizer.min_lr=1": ("min_lr = 1", "lr = 0.003"),
    "optimizer.warmup_steps=25": ("warmup_steps = 25", "steps = 24"),
    "optimizer.betas=[0.9]": ("optimizer.betas = [0.9]", "2 items"),
    "optimizer.betas=[0.9, 1]": ("optimizer.betas.1 = 1", "less than 1"),
    # the rest
    "train.micro_batch=2": ("micro_batch = 2", "global_batch = 1"),
    "train.name=../x": ("train.name = '../x'", "matches"),
    "train.seed=4294967296": ("train.seed = 4294967296", "less than 4294967296"),
    "optimizer.lr=1e300": ("optimizer.lr = 1e+300", "1e+30"),
    "launch.environment.WORLD_SIZE='3'": ("launch.environment.WORLD_SIZE", "torchrun", "leave it out"),
    "launch.nodes=1000000000": ("launch.nodes = 1000000000", "65536"),
    "train.steps=9223372036854775808": ("train.steps = 9223372036854775808", "9223372036854775807"),
    "launch.nodes=2": ("launch.nodes = 2", "launch.master_address"),
    "launch.master_address=host": ("launch.master_address = 'host'", "launch.nodes = 1"),
    "launch.scheduler=cron": ("'cron'", "'torchrun', 'slurm' or 'kubernetes'"),
    "launch.scheduler=slurm": ("'slurm'", "launch.cpus_per_node"),
    "train.timeout_s=99999999999999": ("train.timeout_s = 99999999999999", "31536000"),
    "launch.stop_timeout_s=99999999999": ("launch.stop_timeout_s = 99999999999", "31536000"),
    "metrics.dir=~/runs": ("metrics.dir = '~/runs'", "'~' and variables are not filled in"),
    "checkpoint.dir=/scratch/$USER": ("checkpoint.dir = '/scratch/$USER'", "written out"),
    "metrics.dir=${SCRATCH}/runs": ("metrics.dir = '${SCRATCH}/runs'", "written out"),
    "data.path=": ("data.path = ''", "text of at least 1 character"),
    "data.tokenizer=": ("data.tokenizer = ''", "text of at least 1 character"),
    "metrics.dir=": ("metrics.dir = ''", "text of at least 1 character"),
    "checkpoint.resume=": ("checkpoint.resume = ''", "text of at least 1 character"),
    "memory.device_gb=1e300": ("memory.device_gb = 1e+300", "1000000000"),
    "metrics.peak_tflops=0": ("metrics.peak_tflops = 0", "greater than 0"),
    "memory.offload=['weights']": ("memory.offload", "'weights'", "'activations'"),
    "memory.offload=['attention', 'attention']": ("memory.offload", "twice"),
    # the override itself
    "train.steps": ("'train.steps'", "section.key=value"),
    "steps=3": ("'steps=3'", "section.key=value"),
    ".=3": ("section.key=value",),
    "train.steps.more=3": ("'steps'", "not a table"),
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_impossible_run_is_refused_with_its_numbers(override):
    overrides = ["launch.nodes=2", "parallel.ring=8"] if override == "launch.nodes=2" else [override]
    with pytest.raises(ConfigError) as refusal:
        demo(*overrides)
    message = str(refusal.value)
    assert all(part in message for part in REFUSED[override]), message
    assert "\n" not in message


LENGTHS = [("contiguous", 8188, 8188), ("zigzag", 8188, 8192), ("zigzag", 16, 16), ("zigzag", 10, 16)]


@pytest.mark.parametrize(("layout", "length", "accepted"), [*LENGTHS, ("zigzag", 1234, 1240)])
def test_R30_R55_a_length_that_does_not_divide_is_refused_with_the_next(layout, length, accepted):
    overrides = (f"sequence.layout={layout}", f"sequence.length={length}")
    if accepted == length:
        assert demo(*overrides).sequence.length == length
    else:
        with pytest.raises(ConfigError, match=f": {accepted} is the next that does"):
            demo(*overrides)


def test_R30_the_next_length_is_one_that_is_accepted():
    """Beyond 2^31 - 1 no length is: the one before is offered."""
    with pytest.raises(ConfigError, match=": 2147483640 is the one before that does"):
        demo("sequence.length=2147483647")


MIXTURE = ("model.architecture=qwen3_moe", "model.config.head_dim=32")


def test_layers_of_a_kind_are_layers_of_the_model():
    with pytest.raises(ConfigError, match=r"mlp_only_layers holds 2: layers are 0 to 1"):
        demo(*MIXTURE, "model.config.mlp_only_layers=[2]")
    with pytest.raises(ConfigError, match=r"layer_types has 1 entries: 2, one a layer"):
        demo("model.architecture=qwen2", "model.config.layer_types=['full_attention']")


def test_a_token_goes_to_as_many_experts_as_there_are():
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 8 must not be above model.config.num_experts = 4"):
        demo(*MIXTURE, "model.config.num_experts=4", "model.config.num_experts_per_tok=8")
    demo(*MIXTURE, "model.config.num_experts=4", "model.config.num_experts_per_tok=4")


def test_a_window_that_qwen_would_not_use_is_refused():
    kinds = "model.architecture=qwen2", "model.config.layer_types=['full_attention', 'sliding_attention']"
    with pytest.raises(ConfigError, match=r"'sliding_attention', which needs model.config.use_sliding_window = true"):
        demo(*kinds, "model.config.sliding_window=16")
    demo(*kinds, "model.config.sliding_window=16", "model.config.use_sliding_window=true")


def test_a_null_of_a_folder_is_as_if_left_out():
    table = demo().model_dump(exclude_unset=True)
    table["model"]["config"] |= {"head_dim": None, "sliding_window": None, "rope_scaling": None, "layer_types": None}
    table["model"]["pretrained"] = "folder"
    assert Config.model_validate(table).model.config["head_dim"] is None


def test_the_words_of_transformers_are_known():
    """They stand in the configuration again, because it imports no transformers."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(architecture.ACTIVATIONS) == set(ACT2FN)
    assert set(architecture.ROPE_NEEDS) == {*ROPE_INIT_FUNCTIONS, "default"}
    assert set(architecture.HEAD_DIMS) == set(arguments.HEAD_DIMS)


UNDECLARED = {"qwen3_moe": {"head_dim"}}  # read by its model though its config class does not declare it


def test_every_family_has_a_table_of_its_keys():
    assert list(architecture.FAMILY_KEYS) == list(pretrained.FAMILIES)


@pytest.mark.parametrize("family", architecture.FAMILY_KEYS)
def test_the_keys_of_a_family_are_those_of_transformers(family):
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    declared = {*default.to_dict(), *default.attribute_map, *UNDECLARED.get(family, ())}
    assert {*architecture.SHARED_KEYS, *architecture.FAMILY_KEYS[family]} == declared


UNREAD = {
    "hiden_act='silu'": r"model\.config\.hiden_act is not a key of 'llama': did you mean 'hidden_act'\?",
    "rope_theta=1e4": r"model\.config\.rope_theta is not a key of 'llama': \[model\.rope\] says it",
    "num_experts=4": r"model\.config\.num_experts is not a key of 'llama': .*",
    "zzz=1": r"model\.config\.zzz is not a key of 'llama': the keys are _name_or_path, architectures, .*",
}


@pytest.mark.parametrize("override", UNREAD)
def test_R110_a_key_of_the_model_that_nothing_reads_is_refused_before_a_process_starts(override, capsys):
    assert launch_command([str(DEMO), "--dry-run", "--set", f"model.config.{override}"]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(f"ringflash: {UNREAD[override]}\n", said.err) and not said.out


LONGROPE = "rope_type='longrope', rope_theta=1e4, factor=2.0, original_max_position_embeddings=64"


def longrope(short: int, long: int, more: str = "") -> str:
    return (
        f"model.config.rope_parameters={{{LONGROPE}, short_factor={[1.0] * short}, long_factor={[2.0] * long}{more}}}"
    )


@pytest.mark.parametrize(
    ("short", "long", "part", "message"),
    [
        (15, 16, "", r"short_factor has 15 numbers: 16, one a frequency, half of a head of 32, are"),
        (16, 0, "", r"long_factor has 0 numbers: 16,"),
        (4, 4, ", partial_rotary_factor=0.3", r"partial_rotary_factor = 0\.3.* 1\.0, since"),
    ],
)
def test_longrope_has_a_factor_for_each_frequency(short, long, part, message, capsys):
    head, given = "model.config.head_dim=32", longrope(short, long, part)
    assert launch_command([str(DEMO), "--dry-run", "--set", head, "--set", given]) == 2
    assert re.match(rf"ringflash: model\.config\.rope_parameters\.{message}", capsys.readouterr().err)
    demo(head, longrope(16, 16, ", partial_rotary_factor=1.0"))


def test_longrope_of_some_layers_is_looked_at_too():
    one = longrope(16, 15).partition("=")[2]
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention\.long_factor has 15 numbers: 16"):
        demo("model.config.head_dim=32", f"model.config.rope_parameters={{full_attention={one}}}")


def test_factors_of_the_table_rope_are_counted_before_a_process_starts():
    keys = ("type='longrope'", "factor=2.0", "original_length=64", f"short_factor={[1.0] * 16}")
    table = [f"model.rope.{key}" for key in keys]
    with pytest.raises(ConfigError, match=r"^model\.rope\.long_factor has 3 numbers: 16, one a frequency"):
        demo("model.config.head_dim=32", *table, "model.rope.long_factor=[1.0, 2.0, 3.0]")
    demo("model.config.head_dim=32", *table, f"model.rope.long_factor={[2.0] * 16}")


def test_a_needle_lies_inside_the_sequence_where_a_run_looks_for_it():
    long = "evaluation.needle.lengths=[64, 8193]"
    with pytest.raises(ConfigError, match=r"lengths holds 8193: at most sequence.length = 8192 is accepted"):
        demo(long, "evaluation.every=3")
    demo(long)


def test_an_optimizer_in_host_memory_needs_zero():
    with pytest.raises(ConfigError, match=r"'optimizer' but parallel.zero = 0 .* 1, 2 or 3 is needed"):
        demo("parallel.zero=0", "memory.offload=['optimizer']")


@pytest.mark.parametrize(
    ("key", "checkpoint"),
    [("offload=['attention']", "full"), ("offload=['activations']", "none"), ("checkpoint_every=2", "none")],
)
def test_a_switch_that_its_checkpointing_would_not_use_is_refused(key, checkpoint):
    with pytest.raises(
        ConfigError, match=rf"memory.{key.split('=')[0]}.*memory.checkpoint = '{checkpoint}'.*is needed"
    ):
        demo(f"memory.checkpoint={checkpoint}", f"memory.{key}")


@pytest.mark.parametrize(("heads", "kv_heads", "ulysses"), [(8, 4, 2), (8, 2, 4), (8, 1, 8), (6, 6, 3)])
def test_heads_that_ulysses_divides(heads, kv_heads, ulysses):
    assert ulysses_config(heads, kv_heads, ulysses).parallel.ulysses == ulysses


@pytest.mark.parametrize(("heads", "kv_heads", "ulysses"), [(6, 6, 4), (12, 6, 4), (12, 4, 3)])
def test_heads_that_ulysses_does_not_divide(heads, kv_heads, ulysses):
    with pytest.raises(ConfigError, match=f"ulysses = {ulysses} .*heads = {heads}.*heads = {kv_heads}"):
        ulysses_config(heads, kv_heads, ulysses)


def ulysses_config(heads: int, kv_heads: int, ulysses: int):
    model = (f"model.config.num_attention_heads={heads}", f"model.config.num_key_value_heads={kv_heads}")
    mesh = ("parallel.ring=1", f"parallel.ulysses={ulysses}", f"launch.processes_per_node={ulysses}")
    return demo(*model, *mesh, "model.config.head_dim=32", "sequence.length=9216")


@pytest.mark.parametrize("key", ["vocab_size", "num_attention_heads", "num_key_value_heads"])
def test_a_model_says_its_shape(tmp_path, key):
    path = tmp_path / "x.toml"
    path.write_text(DEMO.read_text().replace(f"{key} =", f"{key[:-1]} ="))
    with pytest.raises(ConfigError, match=rf"model\.config\.{key} is missing.*'{key[:-1]}'"):
        load(path)


def test_documents_need_a_micro_batch_of_one():
    with pytest.raises(ConfigError, match=r"train\.micro_batch = 2 must be 1 while data\.document_mask = true"):
        demo("train.micro_batch=2", "train.global_batch=2")


MISSING = {
    "[sequence]\nlength": ("sequence.length is missing: Tokens of one packed sequence", "[sequence]\n#"),
    "steps =": ("train.steps is missing: Optimizer steps of the run", "#"),
    'dtype = "float32"': ("model.dtype is missing: accepted is 'float32', 'bfloat16'; Type of the parameters", ""),
    "[launch]\nprocesses_per_node = 4": ("the section [launch] is missing", ""),
}


@pytest.mark.parametrize("text", MISSING)
def test_what_is_missing_is_named(tmp_path, text):
    message, replacement = MISSING[text]
    path = tmp_path / "x.toml"
    path.write_text(DEMO.read_text().replace("warmup_steps = 5 ", "# ").replace(text, replacement))
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert message in str(refusal.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml' cannot be read"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad\.toml' is not TOML: .*line 1"):
        load(tmp_path / "bad.toml")


def test_folders_are_looked_for_only_when_asked(tmp_path):
    check_paths(demo())
    with pytest.raises(ConfigError, match=r"data\.path = '.*absent' is not there: a folder of text"):
        check_paths(demo(f"data.path={tmp_path / 'absent'}"))
    with pytest.raises(ConfigError, match=r"holds no file that fits data\.pattern = '\*\*/\*\.py'"):
        check_paths(demo(f"data.path={tmp_path}"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("pass\n")
    check_paths(demo(f"data.path={tmp_path}"))
    check_paths(demo(f"data.path={tmp_path / 'a' / 'x.py'}"))
    with pytest.raises(ConfigError, match=r"data\.tokenizer = '.*absent' is not a folder"):
        check_paths(demo(f"data.tokenizer={tmp_path / 'absent'}"))
    (tmp_path / "file").write_text("")
    for other in ("absent", "file"):
        with pytest.raises(
            ConfigError, match=rf"checkpoint\.resume = '.*{other}' is not a folder: 'auto', 'no' or the"
        ):
            check_paths(demo(f"checkpoint.resume={tmp_path / other}"))
    for accepted in ("auto", "no", tmp_path):
        check_paths(demo(f"checkpoint.resume={accepted}"))


def test_a_login_node_needs_no_torch():
    heavy = "{'torch', 'transformers', 'deepspeed', 'wandb'} & sys.modules.keys()"
    code = f"import sys, train.config; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_bf16_gradients_are_not_accumulated_without_zero():
    with pytest.raises(ConfigError, match=r"parallel.zero = 0 with model.dtype = 'bfloat16'"):
        demo("parallel.zero=0", "model.dtype=bfloat16")


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a folder that is there and takes no file")
def test_a_folder_that_is_there_and_takes_no_file_is_refused(tmp_path):
    config = demo(f"metrics.dir={tmp_path}", "checkpoint.dir=/proc/sys")
    with pytest.raises(ConfigError, match=r"checkpoint.dir = '/proc/sys' cannot be written"):
        check_paths(config)
    check_paths(config, trains=False)


def test_metrics_that_are_a_folder_are_refused(tmp_path):
    (tmp_path / "demo" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a folder: a file, or none, is accepted there"):
        check_paths(demo(f"metrics.dir={tmp_path}"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = demo(f"metrics.dir={tmp_path}/file/below")
    with pytest.raises(ConfigError, match=r"metrics.dir = .* cannot be written"):
        check_paths(config)


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "checkpoint.resume", "model.pretrained"])
def test_a_folder_that_may_not_be_looked_at_is_refused(tmp_path, key):
    """As below a folder of another group; a name that is too long is refused to root as well."""
    with pytest.raises(ConfigError, match=f"{'x' * 300}' cannot be looked at: File name too long"):
        check_paths(demo(f"metrics.dir={tmp_path}", f"{key}={tmp_path}/{'x' * 300}"))


def test_data_that_may_not_be_listed_are_not_taken_for_none(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(ConfigError, match=f"'{tmp_path}' cannot be looked at: Permission denied"):
        check_paths(demo(f"metrics.dir={tmp_path}", f"data.path={tmp_path}"))


SOURCES = {
    "data.sources=[{path='x', format='text'}]": "data.path = 'stdlib' beside 1 table(s) [[data.sources]]: one of both",
    "data.sources=[{format='text'}]": "data.sources.0.path is missing: Folder, or one file",
    "data.sources=[{path='x', format='csv'}]": "data.sources.0.format = 'csv' (a string): accepted is 'text', 'jsonl'",
    "data.sources=[{path='x', format='text', weight=0}]": "data.sources.0.weight = 0 (an integer)",
}


@pytest.mark.parametrize("override", SOURCES)
def test_a_source_beside_a_path_or_without_its_keys(override):
    with pytest.raises(ConfigError, match=re.escape(SOURCES[override])):
        demo(override)


def mixed(tmp_path, tables, head=""):
    """The demo with these [[data.sources]] in place of its path."""
    text = DEMO.read_text().replace('path = "stdlib"\npattern = "**/*.py"\n', head)
    for keys in tables:
        text += "\n[[data.sources]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    (tmp_path / "mixed.toml").write_text(text)
    return load(tmp_path / "mixed.toml")


UNUSED = [
    ({"format": "text", "field": "body"}, "data.sources.0.field is given but data.sources.0.format = 'text'"),
    ({"format": "text", "chat": True}, "data.sources.0.chat is given but data.sources.0.format = 'text'"),
    ({"format": "text", "tokens": True}, "data.sources.0.tokens is given but data.sources.0.format = 'text'"),
    ({"format": "jsonl", "split": "test"}, "data.sources.0.split is given but data.sources.0.format = 'jsonl'"),
    ({"format": "datasets", "pattern": "*"}, "data.sources.0.pattern is given but data.sources.0.format = 'datasets'"),
    ({"format": "jsonl", "chat": True}, "data.sources.0.chat = true needs a chat template: data.tokenizer = 'bytes'"),
    ({"format": "jsonl", "chat": True, "tokens": True}, "data.sources.0.chat = true and data.sources.0.tokens = true"),
    ({"format": "jsonl", "path": "stdlib"}, "data.sources.0.path = 'stdlib' holds no jsonl"),
]


@pytest.mark.parametrize(("keys", "message"), UNUSED)
def test_a_key_that_a_source_would_not_use_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        mixed(tmp_path, [{"path": "x"} | keys])


def test_sources_of_a_file(tmp_path):
    tables = [{"path": "a", "format": "jsonl", "weight": 3}, {"path": "b", "format": "text", "pattern": "*.md"}]
    config = mixed(tmp_path, tables)
    assert [source.weight for source in config.data.all_sources] == [3.0, 1.0]
    assert [source.glob for source in config.data.all_sources] == ["**/*.jsonl", "*.md"]
    with pytest.raises(ConfigError, match=re.escape("data.path = None beside 0 table(s) [[data.sources]]")):
        mixed(tmp_path, [])
    with pytest.raises(ConfigError, match=r"data\.pattern is given but only data\.path uses it"):
        mixed(tmp_path, tables, 'pattern = "*.txt"\n')


@pytest.mark.parametrize("pattern", ["**.txt", ".", "a**/b"])
def test_what_is_no_pattern_of_files_is_refused_with_its_key(tmp_path, pattern):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=re.escape(f"data.pattern = {pattern!r} is no pattern of files (")):
        check_paths(demo(f"data.path={tmp_path}", f"data.pattern={pattern}"))


def test_slurm_warns_at_most_so_long_before_the_end():
    slurm = ["launch.scheduler=slurm", "launch.cpus_per_node=8", "launch.stop_timeout_s=65536"]
    with pytest.raises(ConfigError, match=r"stop_timeout_s = 65536: slurm warns at most 65535 seconds"):
        demo(*slurm)
    demo(*slurm, "slurm.options=['--signal=USR1@60']")


def test_the_paths_of_sources(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    one = [{"path": str(tmp_path / "a.jsonl"), "format": "jsonl"}]
    check_paths(mixed(tmp_path, one))
    for keys, message in (
        ({"path": "absent", "format": "parquet"}, "data.sources.1.path = 'absent' is not there: a folder of .parquet"),
        ({"path": "absent", "format": "datasets"}, "data.sources.1.path = 'absent' is not a folder: one that the"),
        ({"path": str(tmp_path), "format": "parquet"}, "holds no file that fits data.sources.1.pattern = '**/*.parq"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_paths(mixed(tmp_path, [*one, keys]))
