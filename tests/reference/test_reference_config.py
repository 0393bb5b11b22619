"""Configurations that do not hold together, roles, and the parameter table."""

from __future__ import annotations

from typing import Any

import pytest
from reference_configurations import RELEASED, SMALL

from reference.config import Config
from reference.parameters import parameter_counts, parameter_shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": None}, "'dim' is missing"),
        ({"n_heads": 4}, "n_heads 4 is not divisible by o_groups 3"),
        ({"rope_head_dim": 7}, "rope_head_dim must be even"),
        ({"head_dim": 4}, "head_dim 4 is below rope_head_dim 8"),
        ({"compress_ratios": [0, 2]}, "compress_ratios has 2 entries for n_layers 9"),
        ({"kv_source_layers": [0, 1, 3, 5]}, "kv_source_layers names layer 0, whose compress_ratios entry is 0"),
        ({"kv_source_layers": [1, 5]}, "compress_ratios of layer 3 differs from that of its source 1"),
        ({"kv_source_layers": [3, 5]}, "kv_source_layers has no layer at or before layer 1"),
        ({"index_source_layers": [1, 5, 6]}, "kv_source_layers names layer 3, index_source_layers does not"),
        ({"candidate_source_layer": 7}, "candidate_source_layer 7 is not in index_source_layers"),
        ({"candidate_source_layer": 3}, "index_source_layers names layer 5, whose rows are not those of"),
        ({"engram_num_embeddings": [232]}, "engram_num_embeddings and engram_layer_ids differ in length"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
        ({"score_func": "sigmoid"}, "score_func 'sigmoid' is not supported"),
        ({"n_activated_experts": 9}, "n_activated_experts exceeds n_routed_experts"),
        ({"window_size": 0}, "window_size must be at least 1"),
    ],
)
def test_invalid_configurations_say_why(change: dict[str, Any], message: str) -> None:
    mapping = {key: value for key, value in {**SMALL, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=r"^config: ") as error:
        Config.from_mapping(mapping)
    assert message in str(error.value)


def test_roles(config: Config) -> None:
    layers = range(config.n_layers)
    assert [layer for layer in layers if config.compresses(layer)] == [1, 3, 5]
    assert [layer for layer in layers if config.re_indexes(layer)] == [6]
    assert [layer for layer in layers if config.reuses(layer)] == [2, 4, 7]
    assert [layer for layer in layers if config.uses_candidates(layer)] == [6]
    assert config.kv_source(7) == 5
    assert config.index_source(7) == 6


def test_parameter_table_of_the_specification() -> None:
    counts = parameter_counts(Config.from_mapping(RELEASED))
    assert counts["stream"] == 491_547
    assert counts["norm"] == 5_120
    for layer in (24, 28, 32, 36):
        assert counts[f"attention/{layer}"] == 132_024_128
        assert counts[f"moe/{layer}"] == 13_626_901_248
        assert counts[f"layer/{layer}"] == 13_759_918_710
        assert sum(counts[f"layer/{reusing}"] for reusing in range(layer + 1, layer + 4)) == 41_263_535_970
        assert sum(counts[f"layer/{member}"] for member in range(layer, layer + 4)) == 55_023_454_680
    assert sum(counts[f"layer/{layer}"] for layer in range(24, 40)) == 220_093_818_720


def test_shapes_and_counts_agree(config: Config) -> None:
    elements = 0
    for name, shape in parameter_shapes(config).items():
        if name.startswith("layers.4."):
            size = 1
            for extent in shape:
                size *= extent
            elements += size
    assert elements == parameter_counts(config)["layer/4"]
