"""Everything the recorder believes about the published inference code, in one table.

Each row says how well it is known. `stated`: the specification or the description of the golden set names it.
`parameter name`: it follows from the checkpoint's names (`layers.2.attn.wq_a.weight` is a parameter of the module
`layers.2.attn.wq_a`). `assumed`: nothing names it; a checkout may call it something else. The recorder stops with one
line that names the row when the code is not as declared, so correcting a row here is all that a maintainer has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from conformance.config import ModelConfig
from conformance.errors import ConformanceError

Evidence = Literal["stated", "parameter name", "assumed"]


class RecordingError(ConformanceError):
    """Recording is not possible; one line."""


@dataclass(frozen=True)
class Name:
    """An attribute of the published code, as a dotted path."""

    path: str
    evidence: Evidence

    def __str__(self) -> str:
        return self.path


REPOSITORY = "deepseek-ai/DeepSeek-V4.1-Flash"
ENTRY, KERNEL = "model", "kernel"
#: Modules of the checkout that may be imported, by the plain names that they import each other under.
MODULES = (ENTRY, "engram", "vision", "image_processor", KERNEL)
CONFIG_FILE = "config.json"
#: SHA-256 of the files that the specification was written from (golden/README.md).
PINNED: Mapping[str, str] = {
    "model.py": "4e9ae23620edc8028ccc5d5fef552ab7fdc7dcd6f79608754fe9f67644056f65",
    "config.json": "2e84f45cf1dac8c7fcbb200e96667d4b913275690668ed496f24c7747207a809",
}

# Names in the module `model`. The model is made as `MODEL(ARGUMENTS(**config))` and called as `model(input_ids,
# start_pos)` with integers [B, T] and a number.
MODEL = Name("Transformer", "assumed")
ARGUMENTS = Name("ModelArgs", "assumed")
SHARED = Name("shared_attn", "stated")
INDEX_KEYS = Name("index_k", "stated")
CANDIDATES = Name("candidates", "assumed")
#: Type of parameters that the code creates without naming one.
DEFAULT_DTYPE = "bfloat16"

# Attributes of modules.
TOKEN_MAP = Name("token_map", "assumed")
"""Of `layers.{l}.engram`: integers [vocabulary], replaced by the set's own map since a reduced set has no tokenizer."""
OWN_INDEX_KEYS = Name("k_cache", "assumed")
"""Of `layers.{l}.attn.indexer` where it owns keys: [max batch, max rows, index_head_dim]."""


@dataclass(frozen=True)
class Kernel:
    """A function of the module `kernel` and the parameters that a call may use, in order."""

    name: str
    parameters: tuple[str, ...]
    evidence: Evidence


KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("act_quant", ("x", "block_size", "scale_fmt", "scale_dtype", "inplace"), "assumed"),
        Kernel("fp4_act_quant", ("x", "block_size", "inplace"), "assumed"),
        Kernel("fp8_gemm", ("a", "a_s", "b", "b_s", "scale_dtype"), "stated"),
        Kernel("fp4_gemm", ("a", "a_s", "b", "b_s", "scale_dtype"), "stated"),
        Kernel("sparse_attn", ("q", "kv", "attn_sink", "topk_idxs", "softmax_scale"), "stated"),
        Kernel("hc_split_sinkhorn", ("mixes", "hc_scale", "hc_base", "hc_mult", "sinkhorn_iters", "eps"), "stated"),
    )
}
"""The names of four are stated, the parameters of all are assumed."""

Source = Literal[
    "input",  # a positional input of a module's forward
    "output",  # what a module's forward returned, or an element of it
    "kernel argument",  # an argument of a kernel called inside a module
    "kernel result",
    "method result",  # of a method of a module
    "quantised",  # what a quantiser made of a tensor of the rank `item`, in place or not, inside a module
    "scaled",  # the product of a module's output with a number, inside the module above it
    "top-k input",  # the tensor [B, T, C] put to a top-k inside a module
    "shared slot",  # an attribute of the shared slots after a module ran, cut to this batch and C rows
]
#: Layers that have a tap: all, or those with a role of numerics.md 6.1 and 8.
Where = Literal["", "engram", "compresses", "indexes", "publishes candidates"]


@dataclass(frozen=True)
class TapPoint:
    """Where a tap is seen. `module` is a path below the model, `{l}` the layer."""

    tap: str
    source: Source
    module: str
    evidence: Evidence
    item: int = 0
    function: str = ""
    occurrence: int = 0
    where: Where = ""

    @property
    def per_layer(self) -> bool:
        """Whether each layer has one."""
        return "{l}" in self.module

    def __str__(self) -> str:
        function = f" of {self.function}" if self.function else ""
        return f"{self.source} {self.item}{function} at {self.module} ({self.evidence})"


_LAYER, _ATTN, _INDEXER, _FFN = "layers.{l}", "layers.{l}.attn", "layers.{l}.attn.indexer", "layers.{l}.ffn"

TAPS = (
    TapPoint("embed", "output", "embed", "parameter name"),
    TapPoint("final_norm", "output", "norm", "parameter name"),
    TapPoint("logits", "output", "head", "parameter name"),
    TapPoint("engram_in", "input", f"{_LAYER}.engram", "parameter name", where="engram"),
    TapPoint("engram_hash", "input", f"{_LAYER}.engram.embed", "parameter name", where="engram"),
    TapPoint("engram_out", "output", f"{_LAYER}.engram", "parameter name", where="engram"),
    TapPoint("pre_in", "input", _LAYER, "assumed", item=1),
    *(
        TapPoint(f"{sublayer}_{part}", "kernel result", _LAYER, "stated", item, "hc_split_sinkhorn", occurrence)
        for occurrence, sublayer in enumerate(("attn", "ffn"))
        for item, part in enumerate(("pre", "post", "comb"))
    ),
    TapPoint("attn_in", "input", _ATTN, "parameter name"),
    TapPoint("q_latent", "output", f"{_ATTN}.q_norm", "parameter name"),
    TapPoint("attn_q", "kernel argument", _ATTN, "stated", 0, "sparse_attn"),
    TapPoint("attn_list", "kernel argument", _ATTN, "stated", 3, "sparse_attn"),
    TapPoint("attn_o", "kernel result", _ATTN, "stated", 0, "sparse_attn"),
    TapPoint("attn_out", "output", _ATTN, "parameter name"),
    TapPoint("latent", "output", f"{_ATTN}.compressor.norm", "parameter name", where="compresses"),
    TapPoint("index_keys", "shared slot", _INDEXER, "stated", function=str(INDEX_KEYS), where="compresses"),
    TapPoint("index_q", "quantised", _INDEXER, "assumed", 4, "fp4_act_quant", where="indexes"),
    TapPoint("index_weights", "scaled", f"{_INDEXER}.weights_proj", "parameter name", where="indexes"),
    TapPoint("index_score", "top-k input", _INDEXER, "assumed", where="indexes"),
    TapPoint("candidates", "shared slot", _INDEXER, "assumed", function=str(CANDIDATES), where="publishes candidates"),
    TapPoint("h_mid", "method result", _LAYER, "assumed", 0, "hc_post"),
    TapPoint("ffn_in", "input", _FFN, "parameter name"),
    TapPoint("gate_weights", "output", f"{_FFN}.gate", "parameter name", item=0),
    TapPoint("gate_indices", "output", f"{_FFN}.gate", "parameter name", item=1),
    TapPoint("ffn_out", "output", _FFN, "parameter name"),
    TapPoint("h_out", "output", _LAYER, "assumed", item=0),
    TapPoint("pre_out", "output", _LAYER, "assumed", item=1),
)

#: A prompt with an image is called as `model(input_ids, start_pos, images=[...])`, the ids of the span being those of
#: the image token; each image is an object with these attributes: the span's first position, the sizes of the grids of
#: patches and of the aligner, patches bf16 [n, 3, P, P], and the token types of the span.
IMAGES = Name("images", "assumed")
IMAGE_FIELDS = ("start", "n_vit_h", "n_vit_w", "n_llm_h", "n_llm_w", "patches", "types")
IMAGE_TAPS = (
    TapPoint("vit_out", "output", "vision", "parameter name"),
    TapPoint("aligner_out", "output", "aligner", "parameter name"),
    TapPoint("h_in", "input", "layers.0", "assumed"),
)
"""Once a scenario with an image, in its prefill; the residual of the first layer holds the placed features."""

#: The draft head is a method of the model, called after each of its calls: `model.forward_spec(output_ids, start_pos)`,
#: with integers [B] and a number. After a prefill it only seeds the rings, and its blocks hand on what they were given;
#: otherwise it returns ids [B,1+n], logits [B,n,V] and confidence [B,n].
DRAFT = Name("forward_spec", "assumed")
DRAFT_HEAD_TAPS = (
    TapPoint("main_hidden", "input", "mtp.0.main_proj", "parameter name"),
    TapPoint("main_x", "output", "mtp.0.main_norm", "parameter name"),
)
_NOT_OF_DRAFTS = ("attn_q", "attn_list")
DRAFT_TAPS = tuple(
    replace(point, module=point.module.replace(_LAYER, "mtp.{l}"))
    for point in TAPS
    if point.per_layer and not point.where and point.tap not in _NOT_OF_DRAFTS
)
"""The taps of a draft block: those of a layer without compression, `{l}` being the block."""

#: Rows put to the sparse attention. `window_rows`, `window_slots`, `selected`, `compressed_rows` and the state
#: `compressed` follow from them and from `attn_list` by numerics.md 6, items 3 and 4.
ATTENTION_ROWS = TapPoint("rows", "kernel argument", _ATTN, "stated", 1, "sparse_attn")


@dataclass(frozen=True)
class StateBuffer:
    """A tensor of a module that holds state: [max batch, rows, features], cut to this batch and its rows."""

    state: str
    module: str
    attribute: Name
    where: Literal["", "compresses", "pools"] = ""


@dataclass(frozen=True)
class PartCall:
    """How a part is called by itself: `module(*arguments)`, by position; `module` is a path below the model.

    A number is passed as `start_pos`; a mask of image tokens that nobody gave is None.
    """

    module: str
    arguments: tuple[str, ...]
    evidence: Evidence

    def __str__(self) -> str:
        return f"{self.module}({', '.join(self.arguments)}) ({self.evidence})"


PARTS: Mapping[str, PartCall] = {
    "block": PartCall(_LAYER, ("h", "pre", "input_ids", "start_pos", "image_mask"), "assumed"),
    "attention": PartCall(_ATTN, ("x", "start_pos"), "assumed"),
    "compressor": PartCall(f"{_ATTN}.compressor", ("x", "start_pos"), "assumed"),
    "query projection": PartCall(f"{_ATTN}.wq_a", ("x",), "parameter name"),
    "query norm": PartCall(f"{_ATTN}.q_norm", ("x",), "parameter name"),
    "moe": PartCall(_FFN, ("x", "image_mask"), "assumed"),
    "gate": PartCall(f"{_FFN}.gate", ("x", "image_mask"), "assumed"),
    "routed expert": PartCall(f"{_FFN}.experts.0", ("x", "routing_weight"), "assumed"),
    "shared expert": PartCall(f"{_FFN}.shared_experts", ("x",), "assumed"),
    "engram": PartCall(f"{_LAYER}.engram", ("h", "input_ids", "start_pos", "image_mask"), "assumed"),
    "engram tables": PartCall(f"{_LAYER}.engram.embed", ("rows",), "parameter name"),
}
"""What `upstream:DIR` can be asked for beside the whole model.

Tokens of `moe` are bf16 [B,T,D], those of the gate and of an expert [N,D], with routing weights fp32 [N,1]. Routing
weights and expert numbers can be put in the gate's place, table X
"""

STATES = (
    StateBuffer("window", _ATTN, Name("kv_cache", "assumed")),
    StateBuffer("index_keys", _INDEXER, OWN_INDEX_KEYS, "compresses"),
    StateBuffer("carry_kv", f"{_ATTN}.compressor", Name("kv_state", "assumed"), "pools"),
    StateBuffer("carry_score", f"{_ATTN}.compressor", Name("score_state", "assumed"), "pools"),
)
DRAFT_WINDOW = StateBuffer("window", "mtp.{l}.attn", Name("kv_cache", "assumed"))


def has(config: ModelConfig, layer: int, where: str) -> bool:
    """Whether a layer has a role that taps and states name."""
    return {
        "": True,
        "engram": layer in config.engram_layer_ids,
        "compresses": config.compresses(layer),
        "pools": config.compresses(layer) and config.ratio(layer) > 1,
        "indexes": config.indexes(layer),
        "publishes candidates": layer == config.candidate_source_layer,
    }[where]
