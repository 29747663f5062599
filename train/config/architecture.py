"""What [model.config] and [model.rope] may hold: rules of `rules.RULES`, in the same form.

transformers looks at types when a model's config is made, and at some values when the model is, in processes that hold
GPUs. What it, the kernels or the planner would refuse then is refused here, where `launch --dry-run` and `plan` read
the same file. What stands here of transformers, which is not imported, a test compares with the one installed.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .refusal import ConfigError

if TYPE_CHECKING:
    from .run import Config

BYTE_VOCABULARY = 258
"""Ids of the built-in byte tokenizer: 0-255 the bytes, 256 end of document, 257 padding."""

MODEL_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys that [model.config] must spell out, so that no run takes its shape from a default of transformers."""

SHARED_KEYS = (
    *MODEL_SHAPE, "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_position_embeddings", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "transformers_version",
    "use_cache",
)  # fmt: skip
"""Keys of [model.config] that every family reads."""

FAMILY_KEYS = {
    "llama": ("attention_bias", "head_dim", "hidden_act", "mlp_bias", "pretraining_tp"),
    "qwen2": ("hidden_act", "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    "qwen3": (
        "attention_bias", "head_dim", "hidden_act", "layer_types", "max_window_layers", "sliding_window",
        "use_sliding_window",
    ),
    "qwen3_moe": (
        "attention_bias", "decoder_sparse_step", "head_dim", "hidden_act", "mlp_only_layers", "moe_intermediate_size",
        "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts", "output_router_logits",
        "router_aux_loss_coef", "sliding_window", "use_sliding_window",
    ),
    "mistral": ("head_dim", "hidden_act", "sliding_window"),
    "gemma3_text": (
        "_sliding_window_pattern", "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim",
        "hidden_activation", "layer_types", "query_pre_attn_scalar", "sliding_window", "use_bidirectional_attention",
    ),
}  # fmt: skip
"""model.architecture -> keys of [model.config] that it reads besides SHARED_KEYS."""

OLD_ROPE = ("rope_theta", "rope_scaling")
"""Keys of config.json before transformers 5, which a folder of model.pretrained may still have."""

MAX_SIZE = 2**31 - 1
"""Of a size of the model: what int32 holds, far beyond any."""

MAX_LAYERS = 2**16
"""Far beyond any model; each layer is made, named and planned one by one."""

ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_length"), ()),
    "yarn": (("factor", "original_length"), ("attention_factor", "beta_fast", "beta_slow")),
    "llama3": (("factor", "original_length", "low_freq_factor", "high_freq_factor"), ()),
    "longrope": (("short_factor", "long_factor", "original_length"), ("factor", "attention_factor")),
}
"""model.rope.type -> keys of [model.rope] that it needs, and those that it may have."""

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
"""Head dimensions that ringflash.attention computes."""

MODEL_REFUSED = {
    "attention_dropout": "attention over a ring has no dropout",
    "attn_logit_softcapping": "no architecture of model.architecture caps its scores",
    "final_logit_softcapping": "the chunked loss caps no logits",
    "output_router_logits": "the loss that balances experts is not linear in the tokens, so no sum over ranks is exact",
    "use_bidirectional_attention": "the loss needs a causal model",
}
"""Keys of [model.config] that would change the model, and why they cannot be honoured."""

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid",
    "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
)  # fmt: skip
"""Activations that transformers knows."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of attention layers that a ring has."""

ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""rope_type of transformers -> keys of its rope_parameters that it cannot do without."""


class Accepted(NamedTuple):
    """Whether a value is, and what is, in words."""

    holds: Callable[[Any], bool]
    words: str


def _whole(least: int, most: int = MAX_SIZE) -> Accepted:
    return Accepted(lambda value: type(value) is int and least <= value <= most, f"an integer in [{least}, {most}]")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_whole_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < MAX_LAYERS for one in value)


_FLAG = Accepted(lambda value: type(value) is bool, "a boolean")
_ACTIVATION = Accepted(
    lambda value: isinstance(value, str) and value in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"
)
_POSITIVE = Accepted(lambda value: _is_number(value) and value > 0, "a positive number")
_FACTORS = Accepted(
    lambda value: isinstance(value, list) and all(_is_number(one) and one > 0 for one in value),
    "an array of positive numbers",
)

VALUES = {
    **dict.fromkeys(MODEL_SHAPE, _whole(1)),
    "num_hidden_layers": _whole(1, MAX_LAYERS),
    "hidden_act": _ACTIVATION,
    "hidden_activation": _ACTIVATION,
    "rms_norm_eps": Accepted(lambda value: type(value) is float and 0 < value < 1, "a float between 0 and 1"),
    "initializer_range": Accepted(lambda value: type(value) is float and 0 <= value < 1e30, "a float >= 0"),
    "max_position_embeddings": _whole(1),
    "sliding_window": _whole(1),
    "max_window_layers": _whole(0),
    "_sliding_window_pattern": _whole(1),
    "layer_types": Accepted(
        lambda value: isinstance(value, list) and all(one in LAYER_TYPES for one in value),
        f"an array of {' and '.join(map(repr, LAYER_TYPES))}",
    ),
    "query_pre_attn_scalar": _whole(1),
    "num_experts": _whole(0),
    "num_local_experts": _whole(0),
    "num_experts_per_tok": _whole(1),
    "moe_intermediate_size": _whole(1),
    "decoder_sparse_step": _whole(1),
    "mlp_only_layers": Accepted(_is_whole_list, "an array of numbers of layers, from 0"),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "use_cache"),
        _FLAG,
    ),
}
"""Key of [model.config] -> what it may be; a null of config.json, which TOML does not have, is as if left out."""

ROPE_VALUES = {
    **dict.fromkeys(
        ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
         "low_freq_factor", "high_freq_factor"), _POSITIVE
    ),
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    # transformers takes others: forgets them with default frequencies, and fails in the first batch with scaled ones
    "partial_rotary_factor": Accepted(lambda value: value == 1, "1.0, since these families turn whole heads"),
}  # fmt: skip
"""Key of transformers' rope_parameters, or of rope_scaling in older folders -> what it may be."""

ELSEWHERE = {"model_type": "model.architecture", "dtype": "model.dtype", "torch_dtype": "model.dtype"}
"""Key of [model.config] -> the key that says it."""


def check_values(config: "Config") -> None:
    """Each value for itself, also of a table that changes a folder's."""
    table = config.model.config
    for key, place in ELSEWHERE.items():
        if key in table:
            raise ConfigError(f"model.config.{key} = {table[key]!r}: {place} says it; leave it out")
    _check_table("model.config", table, VALUES)
    for name, rope in _rope_tables(table):
        _check_rope_table(name, rope)
    beside = {key: ROPE_VALUES[key] for key in ("rope_theta", "partial_rotary_factor")}
    _check_table("model.config", table, beside)


def _rope_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, what stands there) of each rope table in [model.config]: one, or one for each kind of layers."""
    for key in ("rope_parameters", "rope_scaling"):
        rope, name = table.get(key), f"model.config.{key}"
        if isinstance(rope, Mapping) and any(isinstance(one, Mapping) for one in rope.values()):
            yield from ((f"{name}.{layers}", one) for layers, one in rope.items())
        elif rope is not None:
            yield name, rope


def _check_table(name: str, table: Mapping[str, Any], values: Mapping[str, Accepted]) -> None:
    for key, accepted in values.items():
        if table.get(key) is not None and not accepted.holds(table[key]):
            raise ConfigError(f"{name}.{key} = {table[key]!r}: {accepted.words} is accepted")


def _check_rope_table(name: str, rope: Any) -> None:
    """One table of rope_parameters: of all layers, or of those of a kind."""
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{name} = {rope!r}: a table with rope_type is accepted")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        raise ConfigError(f"{name}.rope_type = {kind!r}: one of {', '.join(ROPE_NEEDS)} is accepted")
    for key in ROPE_NEEDS[kind]:
        if rope.get(key) is None:
            raise ConfigError(f"{name}.{key} is missing: rope_type = {kind!r} needs it")
    _check_table(name, rope, ROPE_VALUES)


def check_rope(config: "Config") -> None:
    rope = config.model.rope
    given = {key for key in rope.model_fields_set - {"type", "theta"} if getattr(rope, key) is not None}
    if rope.type is None:
        if given:
            raise ConfigError(
                f"model.rope.{min(given)} is given without model.rope.type: one of {', '.join(ROPE_KEYS)}"
            )
        return
    needed, possible = ROPE_KEYS[rope.type]
    for key in needed:
        if key not in given:
            raise ConfigError(f"model.rope.{key} is missing: model.rope.type = {rope.type!r} needs it")
    if unused := given - {*needed, *possible}:
        raise ConfigError(f"model.rope.{min(unused)} is given but model.rope.type = {rope.type!r} does not use it")
    if rope.type == "longrope" and not given & {"factor", "attention_factor"}:
        raise ConfigError("model.rope.factor is missing: longrope needs it, or model.rope.attention_factor")
    if rope.type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:  # type: ignore[operator]
        raise ConfigError(
            f"model.rope.high_freq_factor = {rope.high_freq_factor} must be above model.rope.low_freq_factor = "
            f"{rope.low_freq_factor}"
        )


def check_shape(config: "Config") -> None:
    table = config.model.config
    if not config.model.is_known:
        return
    for key in MODEL_SHAPE:
        if key not in table:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"; did you mean it by {near[0]!r}?" if near else ""
            raise ConfigError(f"model.config.{key} is missing, an integer >= 1 is needed{hint}")
        if table[key] is None:
            raise ConfigError(f"model.config.{key} = None: {VALUES[key].words} is accepted")


def check_keys(config: "Config") -> None:
    """A key that nothing reads would be kept and ignored. With pretrained, see `pretrained.check_overrides`."""
    model = config.model
    if model.pretrained is not None or model.architecture is None:
        return
    known = {*SHARED_KEYS, *FAMILY_KEYS[model.architecture]}
    for key in model.config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(sorted(known))}"
            hint = "[model.rope] says it" if key in OLD_ROPE else hint
            raise ConfigError(f"model.config.{key} is not a key of {model.architecture!r}: {hint}")


def check_vocabulary(config: "Config") -> None:
    if not config.model.is_known:
        return
    size = config.model.config["vocab_size"]
    if config.data.tokenizer == "bytes" and size < BYTE_VOCABULARY:
        raise ConfigError(
            f"model.config.vocab_size = {size} does not hold the tokenizer 'bytes': "
            f"at least {BYTE_VOCABULARY} is needed"
        )
    padding = config.model.config.get("pad_token_id")
    if type(padding) is int and not -size <= padding < size:
        raise ConfigError(f"model.config.pad_token_id = {padding} is no id below model.config.vocab_size = {size}")


def check_refused(config: "Config") -> None:
    table = config.model.config
    for key, reason in MODEL_REFUSED.items():
        if table.get(key):
            raise ConfigError(f"model.config.{key} = {table[key]!r}: {reason}; leave it out")


def check_head_dim(config: "Config") -> None:
    table, architecture = config.model.config, config.model.architecture
    if not config.model.is_known:
        return
    given = table.get("head_dim")
    if given is None and architecture in ("qwen3", "qwen3_moe", "gemma3_text"):
        raise ConfigError(f"model.config.head_dim is missing: {architecture} does not derive it from hidden_size")
    head_dim = table["hidden_size"] / table["num_attention_heads"] if given is None else given
    if head_dim not in HEAD_DIMS or isinstance(given, float):
        name = "model.config.hidden_size / num_attention_heads" if given is None else "model.config.head_dim"
        raise ConfigError(f"{name} = {head_dim!r}: accepted is {', '.join(map(str, HEAD_DIMS))}")


def check_frequencies(config: "Config") -> None:
    """LongRoPE divides each frequency by a factor of its own; transformers looks at how many when a batch comes."""
    table = config.model.config
    if not config.model.is_known:
        return
    head_dim = table.get("head_dim") or table["hidden_size"] // table["num_attention_heads"]
    for name, rope in [("model.rope", config.model.rope.model_dump()), *_rope_tables(table)]:
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        for key in ROPE_NEEDS["longrope"]:
            if len(rope[key]) != head_dim // 2:
                raise ConfigError(
                    f"{name}.{key} has {len(rope[key])} numbers: {head_dim // 2}, one a frequency, half of a head of "
                    f"{head_dim}, are accepted"
                )


def check_layers(config: "Config") -> None:
    """Kinds of layers: one for each, and a window where one is used."""
    table = config.model.config
    kinds = table.get("layer_types")
    if not config.model.is_known or kinds is None:
        return
    layers = table["num_hidden_layers"]
    if len(kinds) != layers:
        raise ConfigError(
            f"model.config.layer_types has {len(kinds)} entries: {layers}, one a layer of "
            f"model.config.num_hidden_layers, are accepted"
        )
    qwen = str(config.model.architecture).startswith("qwen")  # a window that is not used is none
    if "sliding_attention" in kinds and qwen and not table.get("use_sliding_window"):
        raise ConfigError(
            "model.config.layer_types holds 'sliding_attention', which needs model.config.use_sliding_window = true "
            "and model.config.sliding_window"
        )


def check_experts(config: "Config") -> None:
    """A token goes to as many experts as there are, at most."""
    table = config.model.config
    if not config.model.is_known:
        return
    for key in ("num_experts", "num_local_experts"):
        experts, chosen = table.get(key), table.get("num_experts_per_tok")
        if experts and chosen is not None and chosen > experts:
            raise ConfigError(
                f"model.config.num_experts_per_tok = {chosen} must not be above model.config.{key} = {experts}"
            )
    beyond = [layer for layer in table.get("mlp_only_layers") or () if layer >= table["num_hidden_layers"]]
    if beyond:
        raise ConfigError(
            f"model.config.mlp_only_layers holds {beyond[0]}: layers are 0 to {table['num_hidden_layers'] - 1}"
        )
