"""The `reference` package behind the suite's interface: each method hands its arguments on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

import reference.attention
import reference.block
import reference.candidates
import reference.compressor
import reference.dspark
import reference.engram
import reference.experts
import reference.gate
import reference.hyper_connections
import reference.images
import reference.indexer
import reference.linear
import reference.model
import reference.moe
import reference.norm
import reference.parameters
import reference.quantize
import reference.rotary
import reference.sampling
import reference.saving
import reference.sparse_attention
import reference.stack
import reference.vision
import reference.window
from conformance import __version__
from conformance.interface import Array, Config, Description, Implementation, Reading, Stateful, Unsupported, Weights
from reference.config import Config as ReferenceConfig
from reference.indexer import Ties
from reference.runtime import Runtime


class _Steps(Protocol):
    """What every stateful class of the reference has; the arguments of `step` differ."""

    @property
    def step(self) -> Any:
        """Advance by one call."""

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on."""

    def state(self) -> dict[str, torch.Tensor]:
        """The state by name."""


class ReferenceStateful(Stateful):
    """A stateful object of the reference.

    Nothing of it is differentiated, and in inference mode torch does less for each of the many small tensors.  What the
    object keeps can then be replaced from outside, not changed in place.
    """

    def __init__(self, inner: _Steps) -> None:
        self.inner = inner

    @torch.inference_mode()
    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Advance by one call and return every tap."""
        taps: dict[str, torch.Tensor] = self.inner.step(**inputs)
        return taps

    @torch.inference_mode()
    def roll_back(self, end: Array) -> None:
        """Forget the tokens of the last call from position `end` on."""
        self.inner.roll_back(end)

    def save_state(self) -> Any:
        """A copy of what the object keeps."""
        return reference.saving.save(self.inner)

    @torch.inference_mode()
    def restore_state(self, saved: Any) -> None:
        """Back to what was kept."""
        reference.saving.restore(self.inner, saved)

    def state(self) -> Mapping[str, Array]:
        """The state by name."""
        return self.inner.state()


class Reference(Implementation):
    """The reference as an implementation under test.

    `compute` is the type of the arithmetic between the rounding points: float32 as in the model, or float64 for a
    yardstick.  `ties` is the rule of its top-k (numerics.md 6.4, topk-ties).
    """

    def __init__(self, compute: torch.dtype = torch.float32, ties: Ties = "library") -> None:
        self.compute = compute
        self.ties: Ties = ties
        self._mapping: Config | None = None
        self._config: ReferenceConfig | None = None

    def describe(self) -> Description:
        """Name and conventions of the reference."""
        return Description(
            name="reference",
            version=__version__,
            conventions={
                "compute": str(self.compute).removeprefix("torch."),
                "topk-ties": "torch.topk" if self.ties == "library" else "earliest position",
                "continued calls": "several tokens at any position, listed in the order of one-token steps",
            },
        )

    def _read(self, config: Config) -> ReferenceConfig:
        """Parse a configuration, once for calls in a row that share it."""
        if self._config is None or self._mapping != config:
            self._config, self._mapping = ReferenceConfig.from_mapping(config), dict(config)
        return self._config

    # quantize -------------------------------------------------------------------------------------------------------

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """Q8."""
        return reference.quantize.quantize_fp8(x)

    def quantize_fp4_e8m0(self, x: Array) -> tuple[Array, Array]:
        """Q4-E8M0."""
        return reference.quantize.quantize_fp4_e8m0(x)

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        """Q4-E4M3."""
        return reference.quantize.quantize_fp4_e4m3(x)

    def fake_quantize_fp8(self, x: Array) -> Array:
        """Q8 and back."""
        return reference.quantize.fake_quantize_fp8(x)

    def fake_quantize_fp4_e8m0(self, x: Array) -> Array:
        """Q4-E8M0 and back."""
        return reference.quantize.fake_quantize_fp4_e8m0(x)

    def fake_quantize_fp4_e4m3(self, x: Array) -> Array:
        """Q4-E4M3 and back."""
        return reference.quantize.fake_quantize_fp4_e4m3(x)

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """FP8 weight to bf16."""
        return reference.quantize.dequantize_fp8_weight(weight, scale)

    def dequantize_fp4_weight(self, weight: Array, scale: Array) -> Array:
        """FP4 weight to bf16."""
        return reference.quantize.dequantize_fp4_weight(weight, scale)

    # linear ---------------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP8 weight."""
        return reference.linear.linear_fp8(x, weight, scale, compute=self.compute)

    def linear_fp4(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP4 weight."""
        return reference.linear.linear_fp4(x, weight, scale, compute=self.compute)

    def linear_bf16(self, x: Array, weight: Array) -> Array:
        """bf16 weight."""
        return reference.linear.linear_bf16(x, weight, compute=self.compute)

    def linear_fp32(self, x: Array, weight: Array) -> Array:
        """fp32 weight."""
        return reference.linear.linear_fp32(x, weight, compute=self.compute)

    # norm -----------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm."""
        return reference.norm.rms_norm(x, weight, eps, compute=self.compute)

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """Frequencies of the layer."""
        return reference.rotary.rotary_frequencies(self._read(config), layer_id)

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine."""
        return reference.rotary.rotary_tables(self._read(config), layer_id, positions, compute=self.compute)

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """Turn the rotary features."""
        return reference.rotary.rotate(self._read(config), layer_id, x, positions, inverse, compute=self.compute)

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """Coefficients of one sublayer."""
        return reference.hyper_connections.hyper_connection_coefficients(
            self._read(config), h, fn, scale, base, compute=self.compute
        )

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """Read the streams."""
        return reference.hyper_connections.hyper_connection_read(h, pre, compute=self.compute)

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """Write the streams."""
        return reference.hyper_connections.hyper_connection_write(y, h, post, comb, compute=self.compute)

    # window ---------------------------------------------------------------------------------------------------------

    def window_rows(self, config: Config, layer_id: int, weights: Weights, x: Array, positions: Array) -> Array:
        """Rows of the window."""
        return reference.window.window_rows(self._read(config), layer_id, weights, x, positions, compute=self.compute)

    def window_indices(self, config: Config, start_pos: int, length: int) -> Array:
        """Rows that queries attend to."""
        return reference.window.window_indices(self._read(config), start_pos, length)

    def window_update(self, config: Config, ring: Array, rows: Array, start_pos: int) -> Array:
        """The ring after a call."""
        return reference.window.window_update(self._read(config), ring, rows, start_pos)

    # compressor -----------------------------------------------------------------------------------------------------

    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        """Compressed rows as cached."""
        return reference.compressor.compressed_rows(
            self._read(config), layer_id, latent, positions, compute=self.compute
        )

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """A compressor with its carry."""
        return ReferenceStateful(
            reference.compressor.Compressor(self._read(config), layer_id, weights, batch_size, compute=self.compute)
        )

    # indexer --------------------------------------------------------------------------------------------------------

    def index_keys(self, config: Config, layer_id: int, weights: Weights, latent: Array, positions: Array) -> Array:
        """Index keys."""
        return reference.indexer.index_keys(
            self._read(config), layer_id, weights, latent, positions, compute=self.compute
        )

    def index_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """Index queries."""
        return reference.indexer.index_queries(
            self._read(config), layer_id, weights, q_latent, positions, compute=self.compute
        )

    def index_weights(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Head weights of the index score."""
        return reference.indexer.index_weights(self._read(config), layer_id, weights, x, compute=self.compute)

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
        return reference.indexer.index_scores(
            self._read(config), layer_id, queries, head_weights, keys, positions, candidates, compute=self.compute
        )

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Selected compressed positions."""
        return reference.indexer.select_positions(self._read(config), layer_id, scores, positions, ties=self.ties)

    # candidates -----------------------------------------------------------------------------------------------------

    def candidate_mask(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Candidate blocks as a mask."""
        return reference.candidates.candidate_mask(self._read(config), layer_id, scores, positions, ties=self.ties)

    # sparse_attention -----------------------------------------------------------------------------------------------

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """Attention over listed rows."""
        return reference.sparse_attention.sparse_attention(q, kv, indices, sink, scale, compute=self.compute)

    # attention ------------------------------------------------------------------------------------------------------

    def query_latent(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Query latent."""
        return reference.attention.query_latent(self._read(config), layer_id, weights, x, compute=self.compute)

    def attention_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """Rotated heads."""
        return reference.attention.attention_queries(
            self._read(config), layer_id, weights, q_latent, positions, compute=self.compute
        )

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        """Output projection."""
        return reference.attention.attention_output(
            self._read(config), layer_id, weights, o, positions, compute=self.compute
        )

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """One attention with its state."""
        return ReferenceStateful(
            reference.attention.Attention(
                self._read(config), layer_id, weights, runtime, batch_size, compute=self.compute
            )
        )

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """Shared slots of one batch of requests."""
        return Runtime(self._read(config), batch_size, reading, ties=self.ties)

    # gate, experts, moe ---------------------------------------------------------------------------------------------

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """Routing weights and experts."""
        return reference.gate.gate(self._read(config), weights, x, image_mask, compute=self.compute)

    def expert(self, config: Config, weights: Weights, x: Array, routing_weight: Array | None) -> Array:
        """One expert."""
        return reference.experts.expert(self._read(config), weights, x, routing_weight, compute=self.compute)

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """Routed and shared experts."""
        return reference.experts.experts(
            self._read(config), weights, x, routing_weights, expert_indices, compute=self.compute
        )

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """Gate and experts."""
        return reference.moe.moe(self._read(config), weights, x, image_mask, compute=self.compute)

    # engram ---------------------------------------------------------------------------------------------------------

    def engram_layout(self, config: Config) -> tuple[Array, Array, Array]:
        """Multipliers, primes, column offsets."""
        return reference.engram.engram_layout(self._read(config))

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """Table rows."""
        return reference.engram.engram_hash(self._read(config), layer_id, token_map, input_ids, image_mask)

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """The residual after an Engram."""
        return reference.engram.engram_write(
            self._read(config), layer_id, weights, h, rows, image_mask, compute=self.compute
        )

    # block, stack, model, sampling ----------------------------------------------------------------------------------

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One layer."""
        return ReferenceStateful(
            reference.block.Block(
                self._read(config), layer_id, weights, runtime, token_map, batch_size, compute=self.compute
            )
        )

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
        return ReferenceStateful(
            reference.stack.Stack(
                self._read(config), layer_ids, weights, runtime, token_map, batch_size, compute=self.compute
            )
        )

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The whole text model."""
        return ReferenceStateful(
            reference.model.Model(self._read(config), weights, runtime, token_map, batch_size, compute=self.compute)
        )

    def embed(self, weight: Array, input_ids: Array) -> Array:
        """Embedding rows."""
        return reference.model.embed(weight, input_ids)

    def head(self, config: Config, weights: Weights, h: Array, pre: Array) -> tuple[Array, Array]:
        """Final norm and logits."""
        return reference.model.head(self._read(config), weights, h, pre, compute=self.compute)

    # vision ---------------------------------------------------------------------------------------------------------

    def image_resize_plan(self, config: Config, width: int, height: int) -> tuple[Array, Array, Array, Array]:
        """Sizes of an image."""
        canvas, patch_grid, aligner_grid, tokens = reference.images.image_resize_plan(self._read(config), width, height)
        return torch.tensor(canvas), torch.tensor(patch_grid), torch.tensor(aligner_grid), torch.tensor(tokens)

    def image_patches(self, config: Config, pixels: Array) -> Array:
        """Pixels to patches; resampling takes Pillow."""
        try:
            return reference.images.image_patches(self._read(config), pixels)
        except ModuleNotFoundError as error:
            raise Unsupported(f"resampling needs {error.name}: install the extra [vision]") from error

    def image_spans(self, config: Config, input_ids: Array, patch_grids: Array) -> tuple[Array, Array]:
        """Ids and token types."""
        return reference.images.image_spans(self._read(config), input_ids, patch_grids)

    def merge_images(
        self, config: Config, weights: Weights, embedded: Array, token_types: Array, features: Array
    ) -> Array:
        """Features and delimiters in their places."""
        return reference.images.merge_images(self._read(config), weights, embedded, token_types, features)

    def patch_embedding(self, config: Config, weights: Weights, patches: Array) -> Array:
        """Projected patches."""
        return reference.vision.patch_embedding(self._read(config), weights, patches, compute=self.compute)

    def vision_rotate(self, config: Config, x: Array, grids: Array) -> Array:
        """Heads turned by row and column."""
        return reference.vision.vision_rotate(self._read(config), x, grids, compute=self.compute)

    def vision_attention(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """Attention of a block."""
        return reference.vision.vision_attention(self._read(config), weights, x, grids, compute=self.compute)

    def vision_mlp(self, config: Config, weights: Weights, x: Array) -> Array:
        """Feed-forward of a block."""
        return reference.vision.vision_mlp(self._read(config), weights, x, compute=self.compute)

    def vision_block(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """One block."""
        return reference.vision.vision_block(self._read(config), weights, x, grids, compute=self.compute)

    def vision(self, config: Config, weights: Weights, patches: Array, grids: Array) -> Array:
        """The tower."""
        return reference.vision.vision(self._read(config), weights, patches, grids, compute=self.compute)

    def aligner(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """Rows of the language model."""
        return reference.vision.aligner(self._read(config), weights, x, grids, compute=self.compute)

    def greedy(self, logits: Array) -> Array:
        """A largest logit."""
        return reference.sampling.greedy(logits)

    def sample(self, logits: Array, temperature: float, exponentials: Array) -> Array:
        """Arg max of probabilities over exponentials."""
        return reference.sampling.sample(logits, temperature, exponentials, compute=self.compute)

    def draws(self, logits: Array, temperature: float, count: int, seed: int) -> Array:
        """Seeded draws."""
        return reference.sampling.draws(logits, temperature, count, seed, compute=self.compute)

    def save_state(self, target: Any) -> Any:
        """A copy of what the object keeps."""
        return target.save_state()

    def restore_state(self, target: Any, saved: Any) -> None:
        """Back to what was kept."""
        target.restore_state(saved)

    # dspark ---------------------------------------------------------------------------------------------------------

    def main_hidden(self, config: Config, residuals: Array) -> Array:
        """What the draft head sees of the model."""
        return reference.model.main_hidden(self._read(config), residuals, compute=self.compute)

    def main_projection(self, config: Config, weights: Weights, main_hidden: Array) -> Array:
        """The draft blocks' view of the model's positions."""
        return reference.dspark.main_projection(self._read(config), weights, main_hidden, compute=self.compute)

    def draft_embedding(self, config: Config, weight: Array, output_ids: Array) -> Array:
        """What drafts begin as."""
        return reference.dspark.draft_embedding(self._read(config), weight, output_ids)

    def draft_attention(
        self, config: Config, layer_id: int, weights: Weights, x: Array, ring: Array, start_pos: Array
    ) -> Array:
        """Attention of drafts over the ring and one another."""
        return reference.dspark.draft_attention(
            self._read(config), layer_id, weights, x, ring, start_pos, compute=self.compute
        )

    def draft_block(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """One draft block."""
        return ReferenceStateful(
            reference.dspark.DraftBlock(self._read(config), layer_id, weights, batch_size, compute=self.compute)
        )

    def markov_bias(self, weights: Weights, previous_ids: Array) -> Array:
        """What the token before a draft adds to its logits."""
        return reference.dspark.markov_bias(weights, previous_ids, compute=self.compute)

    def draft_confidence(self, weights: Weights, hidden: Array, previous_ids: Array) -> Array:
        """Raw confidence."""
        return reference.dspark.draft_confidence(weights, hidden, previous_ids, compute=self.compute)

    def draft_tokens(
        self, config: Config, weights: Weights, head_weight: Array, h: Array, pre: Array, output_ids: Array
    ) -> tuple[Array, Array, Array]:
        """The end of the draft head."""
        return reference.dspark.draft_tokens(
            self._read(config), weights, head_weight, h, pre, output_ids, compute=self.compute
        )

    def dspark(self, config: Config, weights: Weights, batch_size: int) -> Stateful:
        """The draft head."""
        return ReferenceStateful(reference.dspark.DSpark(self._read(config), weights, batch_size, compute=self.compute))

    def roll_back(self, target: Any, end: Array) -> None:
        """Forget rejected tokens."""
        target.roll_back(end)

    def parameter_counts(self, config: Config) -> Mapping[str, int]:
        """Learned elements by unit."""
        return reference.parameters.parameter_counts(self._read(config))
