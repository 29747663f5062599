"""The attention implementation "ring" for transformers models: an attention function and a mask function.

`register` puts both where transformers looks them up by name; no model is patched. What a model asks for and a ring
cannot do exactly is refused, naming the layer and the argument. transformers is imported by `register` alone.
`freeze_rope` changes a config so that no rotary frequency depends on the rank.

Letters: B batch, L local tokens, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import arguments
from .api import attention
from .group import Ring
from .layout import Layout

USED = frozenset({"layout", "position_ids", "s_aux", "scaling", "sliding_window", "softcap"})

# keyword: (values that ask for nothing, why no other is accepted)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "dropout": ((None, 0.0), "the ring has no attention dropout; set config.attention_dropout = 0"),
    "is_causal": ((None, True), "the model must be causal; other masks go into ring.layout(intervals=...)"),
    "output_attentions": ((None, False), "the attention weights never exist; leave it out"),
    "use_cache": ((None, False), "a ring keeps no key/value cache; leave it out"),
}

# meant for other parts of the model, which hands all of its keywords on to attention
ELSEWHERE = frozenset({"num_items_in_batch", "output_hidden_states", "output_router_logits", "shift_labels"})

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def register(ring: Ring, name: str = "ring") -> None:
    """Make `attn_implementation=name` of transformers models attention over a ring.

    ring: its layouts are used where a call gives none
    name: an earlier registration of ours under it is replaced; not a name of transformers, nor with 'flash' in it, for
        which transformers would look for a hub kernel

    Call: model(layout.shard(ids), position_ids=layout.position_ids[None], layout=layout). Documents and padding are the
        layout's; each layer's sliding window is added. Without layout= it is ring.layout(L * ring.size), causal, and
        position_ids must equal layout.positions. A model's own loss needs labels shifted before the cut: shift_labels=.
    Cache: models fill an empty key/value cache unless told use_cache=False. It costs memory and changes no number, so
        config.use_cache = True is let pass; a cache that holds keys is refused, and so is use_cache=True against the
        config, where the model hands it on to attention.
    Raises: ValueError here for such a name; ValueError or TypeError in the model's call for whatever would be ignored:
        see REFUSED, `_check_layer`, `_check_mask`, `_check_rule`; any keyword not named at the top of this file.
    Source: transformers, AttentionInterface and AttentionMaskInterface; versions 5.10 to 5.24.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(ring, Ring):
        raise TypeError(f"ring is {type(ring).__name__}; it must be a ringflash.Ring")
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} is {type(name).__name__}; it must be a str")
    if "flash" in name.lower() or not name.replace("-", "_").isidentifier():
        raise ValueError(f"name={name!r} must be one word of letters, digits, _ and -, without 'flash' in it")
    for interface in (AttentionInterface, AttentionMaskInterface):
        taken = interface().get(name)
        if taken is not None and not isinstance(getattr(taken, "__self__", None), _Implementation):
            raise ValueError(f"name={name!r} is an implementation of transformers; choose another, such as 'ring'")
    implementation = _Implementation(ring)
    AttentionInterface.register(name, implementation.attention)
    AttentionMaskInterface.register(name, implementation.mask)


def freeze_rope(config: Any, length: int) -> Any:
    """A copy of a transformers config whose rotary frequencies depend on no batch, as they are at `length` positions.

    length: tokens of the longest sequence, over all ranks
    returns a config with standard rope_parameters: dynamic NTK becomes "default" with the base that it has at this
        length, LongRoPE has the factors for this length twice; other types stay. Make the model from it.

    Numerics: bitwise the frequencies that transformers computes for a sequence of this length.
    Source: transformers, modeling_rope_utils, which chooses by the largest position of each rank's call.
    """
    arguments.whole("length", length)
    if not hasattr(config, "model_type"):
        raise TypeError(f"config is {type(config).__name__}; it must be a config of transformers")
    frozen = copy.deepcopy(config)
    rope = getattr(frozen, "rope_parameters", None) or {}
    for layer_type in [None] if "rope_type" in rope else list(rope):
        one = rope if layer_type is None else rope[layer_type]
        if one is None:
            continue
        if one["rope_type"] == "dynamic":
            _freeze_dynamic(frozen, one, length)
        elif one["rope_type"] == "longrope":
            _freeze_longrope(frozen, one, length)
    return frozen


def _freeze_dynamic(config: Any, rope: dict[str, Any], length: int) -> None:
    original, factor = config.max_position_embeddings, rope.pop("factor")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    stretched = factor * max(length, original) / original - (factor - 1)
    rope |= {"rope_type": "default", "rope_theta": rope["rope_theta"] * stretched ** (dim / (dim - 2))}


def _freeze_longrope(config: Any, rope: dict[str, Any], length: int) -> None:
    original = rope["original_max_position_embeddings"]
    kept = rope["long_factor"] if length > original else rope["short_factor"]
    if rope.get("attention_factor") is None:
        factor = rope.get("factor") or config.max_position_embeddings / original
        rope["attention_factor"] = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope |= {"short_factor": list(kept), "long_factor": list(kept)}


class _Implementation:
    """The two functions of one ring, in the form in which transformers calls them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._checked: tuple[Callable[[], object], Layout] | None = None

    def attention(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None = None, **given: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """query: [B, H, L, D]; key, value: [B, G, L, D]; returns out [B, L, H, D] and no weights."""
        layer = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        _check_keywords(layer, module, given)
        _check_layer(layer, module, given.get("sliding_window"))
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{layer}: key has {key.shape[2]} tokens and query has {query.shape[2]}; they must be the same tokens: "
                "no key/value cache (use_cache=False) and no cross attention"
            )
        if attention_mask is not None:
            _check_mask(layer, attention_mask, query.shape[2])
        layout = self._layout(layer, query.shape[2], given.get("layout"), given.get("position_ids"))
        out = attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            layout=layout,
            window=given.get("sliding_window"),
            scale=given.get("scaling"),
            sinks=given.get("s_aux"),
            softcap=given.get("softcap"),
        )
        assert isinstance(out, torch.Tensor)
        return out, None

    def mask(
        self, *, mask_function: Callable, attention_mask: torch.Tensor | None, q_length: int, kv_length: int,
        **building: Any,
    ) -> None:  # fmt: skip
        """No mask tensor is ever built: the layout has the mask. Raises where the model's own mask would be another.

        building: how transformers would build the tensor; of it config, local_size and use_vmap count
        """
        layers = f"every layer of {type(building.get('config')).__name__}"
        if attention_mask is not None:
            _check_mask(layers, attention_mask, q_length)
        if q_length != kv_length:
            raise ValueError(
                f"{layers}: the key/value cache makes {kv_length} keys of {q_length} queries; call the model "
                "without a cache and with use_cache=False"
            )
        _check_rule(layers, mask_function, building.get("local_size"), building.get("use_vmap", False))

    def _layout(self, layer: str, length: int, layout: Layout | None, position_ids: torch.Tensor | None) -> Layout:
        """The layout of this call, its positions checked once a forward: the layers share one tensor."""
        given = layout is not None
        if layout is None:
            layout = self.ring.layout(length * self.ring.size)
        elif not isinstance(layout, Layout):
            raise TypeError(f"{layer}: layout={layout!r} is {type(layout).__name__}; it must come from ring.layout()")
        if given and torch.compiler.is_compiling():
            return layout  # comparing values would break the graph
        if position_ids is not None and self._checked is not None:
            checked, of = self._checked
            if checked() is position_ids and of is layout:
                return layout
        _check_positions(layer, position_ids, layout, given=given)
        self._checked = None if position_ids is None else (weakref.ref(position_ids), layout)
        return layout


def _check_keywords(layer: str, module: torch.nn.Module, given: dict[str, Any]) -> None:
    unknown = sorted(set(given) - USED - set(REFUSED) - ELSEWHERE)
    if unknown:
        raise ValueError(
            f"{layer}: {unknown[0]}={given[unknown[0]]!r} is a keyword that ring attention does not know; it takes "
            f"{', '.join(sorted(USED))}, and documents as ring.layout(cu_seqlens=...)"
        )
    asked = dict(given)
    if not module.training:
        asked.pop("dropout", None)
    if given.get("is_causal") is None:
        asked["is_causal"] = getattr(module, "is_causal", None)
    if getattr(getattr(module, "config", None), "use_cache", False):
        asked.pop("use_cache", None)  # the default of every model's config, not a wish of the caller
    for name, (nothing, reason) in REFUSED.items():
        if asked.get(name) not in nothing:
            raise ValueError(f"{layer}: {name}={asked[name]!r} is not possible: {reason}")


def _check_layer(layer: str, module: torch.nn.Module, window: int | None) -> None:
    """The window that the layer hands over is the one its config means; its positions do not depend on the rank."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if strange := set(types or ()) - LAYER_TYPES:
        raise ValueError(f"{layer}: layer_types has {sorted(strange)}; a ring has only {sorted(LAYER_TYPES)}")
    sliding = getattr(config, "sliding_window", None) is not None
    if types and isinstance(getattr(module, "layer_idx", None), int):
        sliding = types[module.layer_idx] == "sliding_attention"
    if sliding != (window is not None):
        kind = "a window" if sliding else "no window"
        raise ValueError(f"{layer}: sliding_window={window}, but the config means {kind} here; the two must agree")
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope] if "rope_type" in rope else rope.values():
        kind = one.get("rope_type", "default") if isinstance(one, dict) else "default"
        if "dynamic" in kind or (kind == "longrope" and one["short_factor"] != one["long_factor"]):
            raise ValueError(
                f"{layer}: rope_type={kind!r} chooses frequencies by the largest position on each rank, so ranks would "
                "differ; make the model from ringflash.hf.freeze_rope(config, length)"
            )


def _check_mask(layer: str, attention_mask: torch.Tensor, length: int) -> None:
    """A padding mask [B, L] without any zero says nothing; every other mask says what would be ignored."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        shape = list(getattr(attention_mask, "shape", ()))
        raise ValueError(
            f"{layer}: attention_mask is {type(attention_mask).__name__} {shape}; leave it out: masks go into "
            "ring.layout(cu_seqlens=..., intervals=...)"
        )
    if attention_mask.shape[1] != length:
        raise ValueError(
            f"{layer}: attention_mask is for {attention_mask.shape[1]} keys and this rank has {length} tokens; "
            "leave it out, and use no key/value cache"
        )
    if zeros := int((attention_mask == 0).sum()):
        raise ValueError(
            f"{layer}: attention_mask has {zeros} zeros in {list(attention_mask.shape)}; leave it out and put padding "
            "behind the last border: ring.layout(cu_seqlens=...)"
        )


def _check_rule(layers: str, rule: Callable, local_size: int | None, composed: bool) -> None:
    """The rule is causal, or causal with this sliding window. The documents that transformers infers from jumps of the
    local positions are passed over: the layout knows the real ones."""
    parts = [part for part in _parts(rule) if part[0] != "packed_sequence_mask_function"]
    causal: list[tuple[str, dict]] = [("causal_mask_function", {})]
    sliding = [("sliding_window_overlay", {"sliding_window": local_size}), *causal]
    if composed or parts not in (causal, sliding):
        names = " and ".join(name for name, _ in parts)
        raise ValueError(
            f"{layers}: mask_function is composed by the model ({names}); it must be causal, with or without the "
            "layer's sliding window; other masks go into ring.layout(intervals=...)"
        )


def _parts(rule: Callable) -> list[tuple[str, dict[str, Any]]]:
    """The rules whose intersection a mask rule of transformers is: the function that made each, and its values."""
    if not inspect.isfunction(rule) or rule.__module__ != "transformers.masking_utils":
        return [(getattr(rule, "__qualname__", repr(rule)), {})]
    made_by = rule.__qualname__.partition(".")[0]
    values = dict(inspect.getclosurevars(rule).nonlocals)
    if made_by == "and_masks":
        return [part for one in values["mask_functions"] for part in _parts(one)]
    if made_by == "remap_positions_for_packed_sequence":
        return _parts(values["mask_function"])
    return [(made_by, values)]


def _check_positions(layer: str, position_ids: torch.Tensor | None, layout: Layout, *, given: bool) -> None:
    """Without layout= the tokens are those of the ring's own layout. With it positions are the caller's, but not
    0, 1, 2, ... on a rank that holds other tokens: a model makes these when it is given none."""
    want = layout.positions
    got = None
    if position_ids is not None and position_ids.shape[-1] == len(want):
        got = position_ids.to(want.device)
    if not given and (got is None or not bool((got == want).all())):
        found = "none of this length" if got is None else f"{got[got != want][0]} out of place"
        raise ValueError(
            f"{layer}: without layout= position_ids must equal ring.layout({layout.seq_len}).positions, got {found}; "
            "call model(layout.shard(ids), position_ids=layout.position_ids[None], layout=layout)"
        )
    default = torch.arange(len(want), device=want.device)
    if got is None or torch.equal(default, want) or torch.equal(default, layout.position_ids):
        return
    if bool((got == default).all()):
        raise ValueError(
            f"{layer}: position_ids count from 0 on rank {layout.ring.rank}, which holds other tokens; give the model "
            "position_ids=layout.position_ids[None]"
        )
