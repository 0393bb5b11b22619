"""The `optimized` package behind the suite's interface: each method hands its arguments on.

Tensors are moved to the device that kernels run on; results come back from there with the suite's own conversion.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

if importlib.util.find_spec("triton") is None:
    raise ImportError("the kernels need triton: pip install 'dsv41-conformance[optimized]' (Linux)")

import optimized.attention
import optimized.candidates
import optimized.compressor
import optimized.device
import optimized.engram
import optimized.experts
import optimized.gate
import optimized.hyper_connections
import optimized.indexer
import optimized.linear
import optimized.model
import optimized.moe
import optimized.norm
import optimized.quantize
import optimized.rotary
import optimized.sampling
import optimized.sparse_attention
import optimized.window
from conformance import __version__
from conformance.adapters.optimized_model import BlockStateful, ModelStateful, StackStateful
from conformance.adapters.optimized_state import AttentionStateful, CompressorStateful, capacity_of, make_runtime
from conformance.interface import (
    Array,
    Config,
    Description,
    Implementation,
    Reading,
    Stateful,
    Unsupported,
    Weights,
)
from optimized.config import Config as KernelConfig


def _there(value: Any) -> Any:
    """A tensor, or each of a mapping when it is looked up, on the kernels' device; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(optimized.device.DEVICE)
    return _Moved(value) if isinstance(value, Mapping) else value


class _Moved(Mapping[str, torch.Tensor]):
    """Weights that move to the device when they are looked up."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].to(optimized.device.DEVICE)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class Optimized(Implementation):
    """The kernels as an implementation under test."""

    def __init__(self) -> None:
        self._mapping: Config | None = None
        self._config: KernelConfig | None = None

    def describe(self) -> Description:
        """Name and device of the kernels."""
        capability = optimized.device.CAPABILITY
        return Description(
            name="optimized",
            version=__version__,
            language="Triton",
            device=capability.name,
            conventions={"architecture": capability.architecture, "topk-ties": "earliest position"},
        )

    def _read(self, config: Config) -> KernelConfig:
        """Parse a configuration, once for calls in a row that share it."""
        if self._config is None or self._mapping != config:
            self._config, self._mapping = KernelConfig.from_mapping(config), dict(config)
        return self._config

    # quantize -------------------------------------------------------------------------------------------------------

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """Q8."""
        return optimized.quantize.quantize_fp8(_there(x))

    def quantize_fp4_e8m0(self, x: Array) -> tuple[Array, Array]:
        """Q4-E8M0."""
        return optimized.quantize.quantize_fp4_e8m0(_there(x))

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        """Q4-E4M3."""
        return optimized.quantize.quantize_fp4_e4m3(_there(x))

    def fake_quantize_fp8(self, x: Array) -> Array:
        """Q8 and back."""
        return optimized.quantize.fake_quantize_fp8(_there(x))

    def fake_quantize_fp4_e8m0(self, x: Array) -> Array:
        """Q4-E8M0 and back."""
        return optimized.quantize.fake_quantize_fp4_e8m0(_there(x))

    def fake_quantize_fp4_e4m3(self, x: Array) -> Array:
        """Q4-E4M3 and back."""
        return optimized.quantize.fake_quantize_fp4_e4m3(_there(x))

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """FP8 weight to bf16."""
        return optimized.quantize.dequantize_fp8_weight(_there(weight), _there(scale))

    def dequantize_fp4_weight(self, weight: Array, scale: Array) -> Array:
        """FP4 weight to bf16."""
        return optimized.quantize.dequantize_fp4_weight(_there(weight), _there(scale))

    # linear ---------------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP8 weight."""
        return optimized.linear.linear_fp8(_there(x), _there(weight), _there(scale))

    def linear_fp4(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP4 weight."""
        return optimized.linear.linear_fp4(_there(x), _there(weight), _there(scale))

    def linear_bf16(self, x: Array, weight: Array) -> Array:
        """bf16 weight."""
        return optimized.linear.linear_bf16(_there(x), _there(weight))

    def linear_fp32(self, x: Array, weight: Array) -> Array:
        """fp32 weight."""
        return optimized.linear.linear_fp32(_there(x), _there(weight))

    # norm -----------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm."""
        return optimized.norm.rms_norm(_there(x), _there(weight), eps)

    def rms_norm_quantize_fp8(self, x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """RMSNorm and Q8 in one pass: not of the interface, but benchmarked where it is there."""
        return optimized.norm.rms_norm_quantize_fp8(_there(x), _there(weight), eps)

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """Frequencies of the layer."""
        return optimized.rotary.rotary_frequencies(self._read(config), layer_id)

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine."""
        return optimized.rotary.rotary_tables(self._read(config), layer_id, _there(positions))

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """Turn the rotary features."""
        return optimized.rotary.rotate(self._read(config), layer_id, _there(x), _there(positions), inverse)

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """Coefficients of one sublayer."""
        return optimized.hyper_connections.hyper_connection_coefficients(
            self._read(config), _there(h), _there(fn), _there(scale), _there(base)
        )

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """Read the streams."""
        return optimized.hyper_connections.hyper_connection_read(_there(h), _there(pre))

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """Write the streams."""
        return optimized.hyper_connections.hyper_connection_write(_there(y), _there(h), _there(post), _there(comb))

    # sparse_attention -----------------------------------------------------------------------------------------------

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """Attention over listed rows."""
        return optimized.sparse_attention.sparse_attention(_there(q), _there(kv), _there(indices), _there(sink), scale)

    # window, compressor ---------------------------------------------------------------------------------------------

    def window_rows(self, config: Config, layer_id: int, weights: Weights, x: Array, positions: Array) -> Array:
        """Rows of the window."""
        return optimized.window.window_rows(self._read(config), layer_id, _there(weights), _there(x), _there(positions))

    def window_indices(self, config: Config, start_pos: int, length: int) -> Array:
        """Not made."""
        raise Unsupported("no list of window rows is made: a query's follow from its position, in the kernel")

    def window_update(self, config: Config, ring: Array, rows: Array, start_pos: int) -> Array:
        """Not alone."""
        raise Unsupported("the ring holds FP8 rows, written by the kernel that makes them: judged with attention")

    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        """Compressed rows as cached."""
        return optimized.compressor.compressed_rows(self._read(config), layer_id, _there(latent), _there(positions))

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """A compressor with its carry."""
        read = self._read(config)
        runtime = make_runtime(read, batch_size, "intended", capacity_of(config))
        return CompressorStateful(read, layer_id, _there(weights), runtime)

    # indexer, candidates --------------------------------------------------------------------------------------------

    def index_keys(self, config: Config, layer_id: int, weights: Weights, latent: Array, positions: Array) -> Array:
        """Index keys."""
        return optimized.indexer.index_keys(
            self._read(config), layer_id, _there(weights), _there(latent), _there(positions)
        )

    def index_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """Index queries."""
        return optimized.indexer.index_queries(
            self._read(config), layer_id, _there(weights), _there(q_latent), _there(positions)
        )

    def index_weights(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Head weights of the index score."""
        return optimized.indexer.index_weights(self._read(config), layer_id, _there(weights), _there(x))

    def index_scores(
        self,
        config: Config,
        layer_id: int,
        queries: Array,
        head_weights: Array,
        keys: Array,
        positions: Array,
        candidates: Array | None,
    ) -> Array:
        """Index scores."""
        tensors = map(_there, (queries, head_weights, keys, positions, candidates))
        return optimized.indexer.index_scores(self._read(config), layer_id, *tensors)

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Selected compressed positions."""
        return optimized.indexer.select_positions(self._read(config), layer_id, _there(scores), _there(positions))

    def candidate_mask(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Candidate blocks as a mask."""
        return optimized.candidates.candidate_mask(self._read(config), layer_id, _there(scores), _there(positions))

    # attention ------------------------------------------------------------------------------------------------------

    def query_latent(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Query latent."""
        return optimized.attention.query_latent(self._read(config), layer_id, _there(weights), _there(x))

    def attention_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """Rotated heads."""
        return optimized.attention.attention_queries(
            self._read(config), layer_id, _there(weights), _there(q_latent), _there(positions)
        )

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        """Output projection."""
        return optimized.attention.attention_output(
            self._read(config), layer_id, _there(weights), _there(o), _there(positions)
        )

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """One attention with its state."""
        return AttentionStateful(self._read(config), layer_id, _there(weights), runtime)

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """The state of a batch of requests."""
        return make_runtime(self._read(config), batch_size, reading, capacity_of(config))

    def save_state(self, target: Any) -> Any:
        """A copy of what the object keeps."""
        return target.save_state()

    def restore_state(self, target: Any, saved: Any) -> None:
        """Back to what was kept."""
        target.restore_state(saved)

    def roll_back(self, target: Any, end: Array) -> None:
        """Forget rejected tokens."""
        target.roll_back(end)

    # gate, experts, moe ---------------------------------------------------------------------------------------------

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """Routing weights and experts."""
        return optimized.gate.gate(self._read(config), _there(weights), _there(x), _there(image_mask))

    def expert(self, config: Config, weights: Weights, x: Array, routing_weight: Array | None) -> Array:
        """One expert."""
        return optimized.experts.expert(self._read(config), _there(weights), _there(x), _there(routing_weight))

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """Routed and shared experts."""
        return optimized.experts.experts(
            self._read(config), _there(weights), _there(x), _there(routing_weights), _there(expert_indices)
        )

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """Gate and experts."""
        return optimized.moe.moe(self._read(config), _there(weights), _there(x), _there(image_mask))

    # block, stack, model --------------------------------------------------------------------------------------------

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One layer."""
        return BlockStateful(self._read(config), layer_id, _there(weights), runtime, token_map)

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Consecutive layers."""
        return StackStateful(self._read(config), layer_ids, _there(weights), runtime, token_map)

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The whole text model."""
        return ModelStateful(self._read(config), _there(weights), runtime, token_map)

    def embed(self, weight: Array, input_ids: Array) -> Array:
        """Embedding rows."""
        return optimized.model.embed(_there(weight), _there(input_ids))

    def head(self, config: Config, weights: Weights, h: Array, pre: Array) -> tuple[Array, Array]:
        """Final norm and logits."""
        return optimized.model.head(self._read(config), _there(weights), _there(h), _there(pre))

    # engram, sampling -----------------------------------------------------------------------------------------------

    def engram_layout(self, config: Config) -> tuple[Array, Array, Array]:
        """Multipliers, primes, column offsets."""
        return optimized.engram.engram_layout(self._read(config))

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """Table rows."""
        return optimized.engram.engram_hash(
            self._read(config), layer_id, _there(token_map), _there(input_ids), _there(image_mask)
        )

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """The residual after an Engram."""
        return optimized.engram.engram_write(
            self._read(config), layer_id, _there(weights), _there(h), _there(rows), _there(image_mask)
        )

    def greedy(self, logits: Array) -> Array:
        """A largest logit."""
        return optimized.sampling.greedy(_there(logits))

    def sample(self, logits: Array, temperature: float, exponentials: Array) -> Array:
        """Arg max of probabilities over exponentials, in logarithms."""
        return optimized.sampling.sample(_there(logits), temperature, _there(exponentials))

    def draws(self, logits: Array, temperature: float, count: int, seed: int) -> Array:
        """Seeded draws."""
        return optimized.sampling.draws(_there(logits), temperature, count, seed)
