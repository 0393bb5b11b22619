"""Parts of mlx-lm's model with the suite's weights, made by mlx-lm's own loader.

The loader reads a folder: one is written with the checkpoint's names and types, and lives as long as the part, since
mlx reads a file when a tensor is first used.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from conformance.interface import Config, Unsupported, Weights

D: Any = importlib.import_module("mlx_lm.models.deepseek_v41")
load_model: Any = importlib.import_module("mlx_lm.utils").load_model

NAMES: Mapping[str, str] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
}
"""Keys of the published `config.json` that mlx-lm knows by another name; the others keep theirs."""

QUANTIZATION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}


def configuration(config: Config, **changes: Any) -> dict[str, Any]:
    """The configuration as mlx-lm reads it, without the Engram that it refuses."""
    kept = {NAMES.get(key, key): value for key, value in config.items() if value is not None}
    kept["model_type"] = "deepseek_v41"
    kept["rope_scaling"] = {
        "factor": config["rope_factor"],
        "original_max_position_embeddings": config["original_seq_len"],
        "beta_fast": config["beta_fast"],
        "beta_slow": config["beta_slow"],
    }
    kept["engram_layer_ids"] = []
    return kept | changes


def arguments(config: Config, **changes: Any) -> Any:
    """`ModelArgs` of a configuration.

    Raises:
        Unsupported: mlx-lm refuses the configuration.
    """
    try:
        return D.ModelArgs.from_dict(configuration(config, **changes))
    except ValueError as refusal:
        raise Unsupported(f"mlx-lm: {refusal}") from refusal


class Loaded:
    """A model that holds some of its weights; whatever else it has is random, and never computed unless used.

    `weights` are prefixed with `prefix` to become the checkpoint's names.
    """

    def __init__(self, config: Config, weights: Weights, prefix: str = "", **changes: Any) -> None:
        arguments(config, **changes)
        self._weights = weights
        """Kept so that the identity of the mapping, by which parts are found again, stays its own."""
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-mlx-")
        folder = Path(self._folder.name)
        settings = configuration(config, **changes) | {"quantization_config": QUANTIZATION}
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        save_file(
            {prefix + name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors"
        )
        self.model = load_model(folder, lazy=True, strict=False)[0]

    def layer(self, layer_id: int) -> Any:
        """A decoder layer."""
        return self.model.model.layers[layer_id]


class Cache:
    """Parts by the identity of their weights: the suite hands over the same mapping for every step of a set."""

    def __init__(self, kept: int = 64) -> None:
        self._parts: dict[tuple[Any, ...], Loaded] = {}
        self._kept = kept

    def get(self, config: Config, weights: Weights, prefix: str, **changes: Any) -> Loaded:
        """The part, made anew where it is not at hand."""
        key = (id(weights), prefix, json.dumps(configuration(config, **changes), sort_keys=True))
        found = self._parts.get(key)
        if found is None:
            while len(self._parts) >= self._kept:
                self._parts.pop(next(iter(self._parts)))
            found = self._parts[key] = Loaded(config, weights, prefix, **changes)
        return found
