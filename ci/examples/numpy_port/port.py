"""What the suite asks for by name: which function or class answers, and how a request becomes a call.

Every function takes the arguments that `conformance/interface.py` lists for the method of its name.
"""

import numpy as np

import attention
import engram
import experts
import hyper_connections
import indexer
import linear
import model
import quantize
import rotary
import tensor_files

FUNCTIONS = {
    quantize: (
        "quantize_fp8",
        "quantize_fp4_e8m0",
        "quantize_fp4_e4m3",
        "fake_quantize_fp8",
        "fake_quantize_fp4_e8m0",
        "fake_quantize_fp4_e4m3",
        "dequantize_fp8_weight",
        "dequantize_fp4_weight",
    ),
    linear: ("linear_fp8", "linear_fp4", "linear_bf16", "linear_fp32", "rms_norm"),
    rotary: ("rotary_frequencies", "rotary_tables", "rotate"),
    hyper_connections: ("hyper_connection_coefficients", "hyper_connection_read", "hyper_connection_write"),
    attention: (
        "window_rows",
        "window_indices",
        "window_update",
        "compressed_rows",
        "sparse_attention",
        "query_latent",
        "attention_queries",
        "attention_output",
    ),
    indexer: ("index_keys", "index_queries", "index_weights", "index_scores", "select_positions", "candidate_mask"),
    experts: ("gate", "expert", "experts", "moe"),
    engram: ("engram_layout", "engram_hash", "engram_write"),
    model: ("embed", "head", "greedy", "parameter_counts"),
}
CLASSES = {
    "runtime": attention.Runtime,
    "compressor": attention.Compressor,
    "attention": attention.Attention,
    "block": model.Block,
    "stack": model.Stack,
    "model": model.Model,
}
MODULES = {name: module for module, names in FUNCTIONS.items() for name in names}

DESCRIPTION = {
    "name": "numpy example",
    "version": "1.0",
    "language": "Python, numpy",
    "methods": [*MODULES, *CLASSES],
    "recipe": True,
}


class Conversation:
    """Answers requests; keeps the objects and the weights of the case that is under way."""

    def __init__(self, folder=""):
        self.folder, self.objects, self.weights = folder, {}, {}

    def run(self, request):
        """Results by name: numpy arrays."""
        kind = request["kind"]
        if kind == "reset":
            self.objects.clear()
            self.weights.clear()
            return {}
        if kind == "state":
            return self.objects[request["object"]].state()
        arguments = {name: self.argument(value) for name, value in request["arguments"].items()}
        if kind == "step":
            return self.objects[request["object"]].step(**arguments)
        method = request["method"]
        if kind == "open":
            self.objects[request["object"]] = CLASSES[method](**arguments)
            return {}
        results = getattr(MODULES[method], method)(**arguments)
        if isinstance(results, dict):
            return results
        return dict(zip(request["returns"], results if isinstance(results, tuple) else (results,), strict=True))

    def argument(self, value):
        """A tensor, weights, an object opened before, or plain JSON."""
        if "tensor" in value:
            return tensor_files.read(value["tensor"], self.folder)
        if "weights" in value:
            # Objects opened with the same weights share what has been read of them.
            key = repr(value["weights"])
            return self.weights.setdefault(key, tensor_files.Weights(value["weights"], self.folder))
        return self.objects[value["object"]] if "object" in value else value["value"]


def quiet():
    """Infinities are part of the computation: numpy need not mention them."""
    np.seterr(all="ignore")
