"""transformers' DeepSeek-V4 as an implementation under test: the pieces that V4.1 shares with it.

There is no V4.1 in transformers; what differs there (index keys, candidates, the late mix, Engram) is not asked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import torch

from conformance.interface import Array, Config, Description, Implementation, Unsupported, Weights

M: Any = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")

WINDOW, COMPRESSED = "main", "compress"


class Transformers(Implementation):
    """Norm, rotary embedding, router and attention with sinks, in eager torch."""

    def describe(self) -> Description:
        """The version, and what is not there."""
        return Description(
            name="transformers",
            version=importlib.metadata.version("transformers"),
            homepage="github.com/huggingface/transformers",
            conventions={
                "model": "DeepSeek-V4: components that V4.1 shares with it, from plain weights",
                "gate": "given fp32 input and weights, as V4.1 computes it",
                "sparse attention": "eager, in bf16 as the model runs; rows gathered by the adapter",
            },
        )

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Weights are kept in fp32 there."""
        norm = M.DeepseekV4RMSNorm(x.shape[-1], eps)
        return _with(norm, weight=weight.float())(x)

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """The inverse frequencies of the layer's kind."""
        rotary, kind = _rotary(config, layer_id)
        return getattr(rotary, f"{kind}_inv_freq").clone()

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine."""
        rotary, kind = _rotary(config, layer_id)
        cos, sin = rotary(torch.zeros(1), positions[None], layer_type=kind)
        return cos[0], sin[0]

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """Turned back with the sine negated, as its attention does."""
        rotary, kind = _rotary(config, layer_id)
        cos, sin = rotary(torch.zeros(1), positions, layer_type=kind)
        heads = x if x.dim() == 4 else x[:, :, None]
        turned = M.apply_rotary_pos_emb(heads, cos, -sin if inverse else sin, unsqueeze_dim=2)
        return turned.reshape(x.shape)

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """Its eager attention over the listed rows of each query."""
        batch, length, heads, width = q.shape
        listed = indices.long().reshape(batch, -1).clamp(min=0)
        rows = kv.gather(1, listed[..., None].expand(-1, -1, width)).reshape(batch * length, 1, -1, width)
        mask = torch.zeros(indices.shape, dtype=q.dtype).masked_fill(indices < 0, -torch.inf)
        module = SimpleNamespace(num_key_value_groups=heads, sinks=sink.to(q.dtype), training=False)
        query = q.reshape(batch * length, heads, 1, width)
        mask = mask.reshape(batch * length, 1, 1, -1)
        out, _ = M.eager_attention_forward(module, query, rows, rows, mask, scaling=scale)
        return out.reshape(q.shape)

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """The router of layers that do not hash."""
        if image_mask is not None and bool(image_mask.any()):
            raise Unsupported("transformers: no other bias for image tokens")
        router = M.DeepseekV4TopKRouter(
            SimpleNamespace(
                num_experts_per_tok=config["n_activated_experts"],
                num_local_experts=config["n_routed_experts"],
                hidden_size=config["dim"],
                scoring_func=config["score_func"],
                routed_scaling_factor=config["route_scale"],
            )
        )
        router.e_score_correction_bias = weights["bias"]
        _, routing_weights, indices = _with(router, weight=weights["weight"].float())(x.float())
        return routing_weights, indices.int()


def _with(module: Any, **parameters: torch.Tensor) -> Any:
    """The module with these parameters, for inference."""
    for name, value in parameters.items():
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    return module.eval()


def _rotary(config: Config, layer_id: int) -> tuple[Any, str]:
    """The rotary embedding of a configuration and the name of the layer's kind in it."""
    width = config["rope_head_dim"]
    yarn = {
        "rope_type": "yarn",
        "rope_theta": config["compress_rope_theta"],
        "partial_rotary_factor": 1.0,
        "factor": config["rope_factor"],
        "original_max_position_embeddings": config["original_seq_len"],
        "beta_fast": config["beta_fast"],
        "beta_slow": config["beta_slow"],
        "attention_factor": 1.0,
    }
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": 1.0}
    settings = SimpleNamespace(
        max_position_embeddings=1 << 20,
        head_dim=width,
        hidden_size=width,
        num_attention_heads=1,
        rope_parameters={WINDOW: plain, COMPRESSED: yarn},
        standardize_rope_params=lambda: None,
    )
    settings.per_layer_config = dict.fromkeys((WINDOW, COMPRESSED), settings)
    return M.DeepseekV4RotaryEmbedding(settings), COMPRESSED if config["compress_ratios"][layer_id] else WINDOW
