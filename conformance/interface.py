"""The interface a port implements: subclass `Implementation` and override what the port has.

Conventions that hold for every method (sections cited as `numerics.md` are those of `reference/numerics.md`):

- Arguments are passed by name: keep the parameters' names.
- Tensors arrive as `tensor_type` asks ("torch", or "numpy" with bf16 widened to float32 and 8- and 4-bit types as
  uint8 codes) and may be returned as torch, numpy or anything that speaks DLPack.  A bf16 result may be returned in
  float32 or float64 provided that every value is exactly a bf16 number: the rounding points are part of the
  specification.  fp32 results may come in float64, integers in any width that holds them.  Nothing is modified in
  place: inputs are hashed before and after.
- Shapes: B batch, T positions of this call, S residual streams, D width, H heads, d head width, W window,
  C compressed rows that exist after the call, n rows produced by it, r the layer's compression ratio.
- `config` holds the model's hyper-parameters under the names that the published `config.json` uses; see
  `conformance/configs/released.json`.
- `weights` maps parameter names, relative to the unit the method stands for, to tensors: `wq_a.weight`,
  `wq_a.scale`, `compressor.norm.weight` for an attention; `attn.wq_a.weight`, `hc_attn_fn` for a block; checkpoint
  names for the model.  FP8 is F8_E4M3 with an F8_E8M0 scale per 32x32 tile; FP4 is U8, two codes a byte, the even
  element in the low nibble, with an F8_E8M0 scale per row and 32 inputs.  At the released sizes it is a read-only
  mapping that makes a tensor when it is looked up and lists only what the case needs: take parameters by name.
- `positions` are absolute token positions, int64 [B, T].  `image_mask` is True at image tokens; None means none.
- A method that is not overridden, or that raises `Unsupported`, is reported as UNSUPPORTED: never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Array = Any
"""A tensor in the port's own library."""

Config = Mapping[str, Any]
Weights = Mapping[str, Array]
Reading = Literal["intended", "literal"]
AccumulatorName = Literal["fp32", "fp8-tensor-core", "fp16"]


class Unsupported(Exception):
    """Raised by a port for a method, or for arguments of a method, that it does not have."""


@dataclass(frozen=True)
class Description:
    """What a port says of itself; shown in the report's header."""

    name: str
    version: str
    language: str = "Python"
    device: str = "cpu"
    homepage: str = ""
    reading: Reading = "intended"
    """Which reading of the published code's shared index-key slot the port follows (numerics.md 6.4)."""
    accumulator: AccumulatorName = "fp32"
    """What sums the products of FP8 and FP4 linears; anything but fp32 widens bounds and is named in the verdict."""
    conventions: Mapping[str, str] = field(default_factory=dict)
    """Free remarks, by name. One is more than a remark: `negative-zero-code`, "kept" or "cleared", says what becomes of
    the FP4 code of a value that rounds to zero from below (numerics.md 1)."""
    deviations: tuple[str, ...] = ()
    """What the port does differently on purpose, by the names of `conformance/deviations/deviations.toml`: it is judged
    by the equations with these deviations, and its verdict names them."""


class Stateful:
    """An object that keeps the state of a batch of requests between calls."""

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Advance by one call and return its results by tap name.

        The inputs and the required result of each kind are listed at the `Implementation` method that makes it.  Any
        other tap named in `fixtures/FORMAT.md` may be returned beside it and is then judged as well.
        """
        raise Unsupported("step")

    def state(self) -> Mapping[str, Array]:
        """Return the state by name: `window` [B,W,d], `compressed` [B,C,d], `index_keys` [B,C,.], `carry_kv`, ..."""
        raise Unsupported("state")


class Implementation:
    """A port of the model, component by component.  Override what the port has; see the module docstring."""

    tensor_type: ClassVar[Literal["torch", "numpy"]] = "torch"
    parallel: ClassVar[bool] = False
    """Whether the port can run as several ranks, each a process that reads RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT and returns whole results (`conformance check --world-size`)."""

    def describe(self) -> Description:
        """Name, version, device and conventions of the port."""
        raise NotImplementedError(f"{type(self).__name__}.describe() must be overridden")

    # quantize -------------------------------------------------------------------------------------------------------

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """Q8: bf16 [..., K] -> codes F8_E4M3 [..., K], scales F8_E8M0 [..., K/32] (numerics.md 2)."""
        raise Unsupported("quantize_fp8")

    def quantize_fp4_e8m0(self, x: Array) -> tuple[Array, Array]:
        """Q4-E8M0: bf16 [..., K] -> packed U8 [..., K/2], scales F8_E8M0 [..., K/32] (numerics.md 2)."""
        raise Unsupported("quantize_fp4_e8m0")

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        """Q4-E4M3: bf16 [..., K] -> packed U8 [..., K/2], scales F8_E4M3 [..., K/16] (numerics.md 2)."""
        raise Unsupported("quantize_fp4_e4m3")

    def fake_quantize_fp8(self, x: Array) -> Array:
        """Q8 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
        raise Unsupported("fake_quantize_fp8")

    def fake_quantize_fp4_e8m0(self, x: Array) -> Array:
        """Q4-E8M0 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
        raise Unsupported("fake_quantize_fp4_e8m0")

    def fake_quantize_fp4_e4m3(self, x: Array) -> Array:
        """Q4-E4M3 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
        raise Unsupported("fake_quantize_fp4_e4m3")

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """F8_E4M3 [N, K] and F8_E8M0 [ceil(N/32), ceil(K/32)] -> bf16 [N, K] (numerics.md 2)."""
        raise Unsupported("dequantize_fp8_weight")

    def dequantize_fp4_weight(self, weight: Array, scale: Array) -> Array:
        """Packed U8 [N, K/2] and F8_E8M0 [N, K/32] -> bf16 [N, K] (numerics.md 2)."""
        raise Unsupported("dequantize_fp4_weight")

    # linear ---------------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """Quantise x with Q8 and multiply: bf16 [..., K], F8_E4M3 [N, K] -> bf16 [..., N] (numerics.md 3)."""
        raise Unsupported("linear_fp8")

    def linear_fp4(self, x: Array, weight: Array, scale: Array) -> Array:
        """Quantise x with Q8 and multiply: bf16 [..., K], packed U8 [N, K/2] -> bf16 [..., N] (numerics.md 3)."""
        raise Unsupported("linear_fp4")

    def linear_bf16(self, x: Array, weight: Array) -> Array:
        """bf16 [..., K], bf16 [N, K] -> bf16 [..., N] (numerics.md 3)."""
        raise Unsupported("linear_bf16")

    def linear_fp32(self, x: Array, weight: Array) -> Array:
        """bf16 or fp32 [..., K] promoted, bf16 or fp32 [N, K] promoted -> fp32 [..., N] (numerics.md 3)."""
        raise Unsupported("linear_fp32")

    # norm -----------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """bf16 [..., K], bf16 or fp32 [K] -> bf16 [..., K] (numerics.md 3)."""
        raise Unsupported("rms_norm")

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """Frequencies of the layer, YaRN included: fp32 [rope_head_dim / 2] (numerics.md 4)."""
        raise Unsupported("rotary_frequencies")

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine at int64 positions [P]: fp32 [P, rope_head_dim / 2] each (numerics.md 4)."""
        raise Unsupported("rotary_tables")

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """Turn the last rope_head_dim features of bf16 [B,T,d] or [B,T,H,d] -> bf16, same shape (numerics.md 4)."""
        raise Unsupported("rotate")

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """bf16 h [B,T,S,D], fp32 fn [(2+S)S, S*D], scale [3], base [(2+S)S] -> fp32 pre, post [B,T,S], comb [B,T,S,S].

        comb is [summed stream, written stream] (numerics.md 5).
        """
        raise Unsupported("hyper_connection_coefficients")

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """bf16 h [B,T,S,D], fp32 pre [B,T,S] -> bf16 [B,T,D] (numerics.md 5)."""
        raise Unsupported("hyper_connection_read")

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """bf16 y [B,T,D], bf16 h [B,T,S,D], fp32 post [B,T,S], comb [B,T,S,S] -> bf16 [B,T,S,D] (numerics.md 5)."""
        raise Unsupported("hyper_connection_write")

    # window ---------------------------------------------------------------------------------------------------------

    def window_rows(self, config: Config, layer_id: int, weights: Weights, x: Array, positions: Array) -> Array:
        """bf16 x [B,T,D] -> the window's key (= value) rows, rotated, fake-quantised, bf16 [B,T,d] (numerics.md 6)."""
        raise Unsupported("window_rows")

    def window_indices(self, config: Config, start_pos: int, length: int) -> Array:
        """Rows that each of `length` queries attends to, int32 [length, n], -1 none (numerics.md 6.3).

        `start_pos = 0` (prefill) indexes this call's rows, n = min(length, W); a decode step indexes ring slots, n = W.
        Entries may come in any order.
        """
        raise Unsupported("window_indices")

    def window_update(self, config: Config, ring: Array, rows: Array, start_pos: int) -> Array:
        """bf16 ring [B,W,d] and rows [B,T,d] of positions start_pos... -> the ring afterwards (numerics.md 6.3)."""
        raise Unsupported("window_update")

    # compressor -----------------------------------------------------------------------------------------------------

    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        """bf16 latent [B,n,d], int64 positions [B,n] of each group's first token -> bf16 cached rows (numerics.md 6.2).

        Rotated, then fake-quantised with Q4-E4M3.
        """
        raise Unsupported("compressed_rows")

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """A compressor with its carry.  `weights` are those of the attention.

        step(x bf16 [B,T,D], start_pos int64 [B]) -> `latent` bf16 [B,n,d], absent or empty when no group completes.
        state() -> `carry_kv`, `carry_score` fp32 [B,r,d] for r > 1.  (numerics.md 6.2)
        """
        raise Unsupported("compressor")

    # indexer --------------------------------------------------------------------------------------------------------

    def index_keys(self, config: Config, layer_id: int, weights: Weights, latent: Array, positions: Array) -> Array:
        """bf16 latent [B,n,d], positions [B,n] of first tokens -> bf16 [B,n,index_head_dim] (numerics.md 6.3)."""
        raise Unsupported("index_keys")

    def index_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """bf16 q_latent [B,T,q_lora_rank] -> bf16 [B,T,index_n_heads,index_head_dim] (numerics.md 6.3)."""
        raise Unsupported("index_queries")

    def index_weights(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """bf16 x [B,T,D] -> scaled head weights bf16 [B,T,index_n_heads] (numerics.md 6.3)."""
        raise Unsupported("index_weights")

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
        """bf16 queries [B,T,H,d], weights [B,T,H], keys [B,C,d], bool candidates [B,T,C] or None -> bf16 [B,T,C].

        -inf where a position is not visible to the query or not among the candidates (numerics.md 6.3).
        """
        raise Unsupported("index_scores")

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """bf16 scores [B,T,C] -> int32 [B,T,min(index_topk,C)], ascending, then -1 (numerics.md 6.3)."""
        raise Unsupported("select_positions")

    # candidates -----------------------------------------------------------------------------------------------------

    def candidate_mask(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """bf16 scores [B,T,C] of the candidate source layer -> bool [B,T,C], whole blocks (numerics.md 6.3)."""
        raise Unsupported("candidate_mask")

    # sparse_attention -----------------------------------------------------------------------------------------------

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """bf16 q [B,T,H,d], kv [B,N,d], int32 indices [B,T,n] (-1 none), fp32 sink [H] -> bf16 [B,T,H,d].

        Not yet turned back (numerics.md 6, item 5).
        """
        raise Unsupported("sparse_attention")

    # attention ------------------------------------------------------------------------------------------------------

    def query_latent(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """bf16 x [B,T,D] -> bf16 [B,T,q_lora_rank], normed (numerics.md 6, item 1)."""
        raise Unsupported("query_latent")

    def attention_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """bf16 q_latent [B,T,q_lora_rank] -> rotated heads bf16 [B,T,H,d] (numerics.md 6, item 1)."""
        raise Unsupported("attention_queries")

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        """bf16 o [B,T,H,d] of the sparse attention -> turned back, projected, bf16 [B,T,D] (numerics.md 6, item 6)."""
        raise Unsupported("attention_output")

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """The attention of one layer, whatever its role, with its ring and what it publishes to `runtime`.

        step(x bf16 [B,T,D], start_pos int64 [B]) -> `attn_out` bf16 [B,T,D].  The layers of one runtime are stepped in
        ascending order within a call.  state() -> `window`, and for sources `compressed`, `index_keys`, `carry_kv`,
        `carry_score`.  (numerics.md 6)
        """
        raise Unsupported("attention")

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """The shared slots of one batch of requests: compressed rows, index keys, selections, candidates (6.1).

        Opaque to the suite; handed to `attention`, `block`, `stack` and `model`.
        """
        raise Unsupported("runtime")

    # gate, experts, moe ---------------------------------------------------------------------------------------------

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """bf16 x [N,D], bool image_mask [N] -> routing weights fp32 [N,k], expert indices int32 [N,k], any order.

        `weights`: `weight`, `bias`, `bias_vl`  (numerics.md 7)
        """
        raise Unsupported("gate")

    def expert(self, config: Config, weights: Weights, x: Array, routing_weight: Array | None) -> Array:
        """One expert, FP4 (routed) or FP8 (shared): bf16 x [N,D], fp32 routing_weight [N] or None -> bf16 [N,D].

        `weights`: `w1.weight`, `w1.scale`, ...  (numerics.md 7)
        """
        raise Unsupported("expert")

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """Routed experts as chosen plus the shared expert: bf16 x [N,D], [N,k], int32 [N,k] -> bf16 [N,D].

        `weights`: `experts.{i}.w1.weight`, `shared_experts.w1.weight`, ...  (numerics.md 7)
        """
        raise Unsupported("experts")

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """Gate and experts together: bf16 x [N,D] -> bf16 [N,D].  `weights` are those of the layer's `ffn` (7)."""
        raise Unsupported("moe")

    # engram ---------------------------------------------------------------------------------------------------------

    def engram_layout(self, config: Config) -> tuple[Array, Array, Array]:
        """Multipliers [L, max_ngram], primes [L, max_ngram - 1, heads], column offsets [L, columns], all int64 (8)."""
        raise Unsupported("engram_layout")

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """int32 token_map [vocabulary], int32 ids [B,T] of positions 0... -> table rows int64 [B,T,columns].

        Column offsets included, columns ordered by n-gram size, then head (numerics.md 8).
        """
        raise Unsupported("engram_hash")

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """bf16 h [B,T,S,D] and int64 table rows [B,T,columns] -> bf16 h [B,T,S,D].

        `weights`: `embed.weight`, `embed.scale`, `wkv.weight`, `wkv.scale`, `q_weight`, `k_weight`  (numerics.md 8)
        """
        raise Unsupported("engram_write")

    # block, stack, model, sampling ----------------------------------------------------------------------------------

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One layer, Engram included where the configuration places it.  `token_map` is None without Engram.

        step(h bf16 [B,T,S,D], pre fp32 [B,T,S], input_ids int32 [B,T], start_pos int64 [B], image_mask bool [B,T] or
        None) -> `h_out`, `pre_out`.  state() as attention.  (numerics.md 5)
        """
        raise Unsupported("block")

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Consecutive layers.  `weights` under checkpoint names; step as `block`."""
        raise Unsupported("stack")

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The whole text model.  `weights` under checkpoint names.

        step(input_ids int32 [B,T], start_pos int64 [B], image_mask bool [B,T] or None, image_features bf16
        [B,T,D] or None, used where image_mask is True) -> `logits` fp32 [B,V] of the last position, `output_ids` int32
        [B].  state() -> `layer{l}/window` and so on.  (numerics.md 9)
        """
        raise Unsupported("model")

    def embed(self, weight: Array, input_ids: Array) -> Array:
        """bf16 [V,D], int32 [B,T] -> bf16 [B,T,D] (numerics.md 9)."""
        raise Unsupported("embed")

    def head(self, config: Config, weights: Weights, h: Array, pre: Array) -> tuple[Array, Array]:
        """bf16 h [B,T,S,D] and fp32 pre [B,T,S] -> final norm bf16 [B,T,D], logits fp32 [B,T,V].

        `weights`: `norm.weight`, `head.weight`  (numerics.md 9)
        """
        raise Unsupported("head")

    # dspark ---------------------------------------------------------------------------------------------------------
    #
    # L model layers are tapped, n drafts are proposed at a time; draft blocks are numbered on from the model's layers.

    def main_hidden(self, config: Config, residuals: Array) -> Array:
        """What the draft head sees of the model: bf16 [B,T,layers,S,D] -> bf16 [B,T,L*D] (numerics.md 10).

        The residuals are those that enter each layer of the model, after Engram; `dspark_target_layer_ids` says which
        are tapped.  A prefill has them at every position.
        """
        raise Unsupported("main_hidden")

    def main_projection(self, config: Config, weights: Weights, main_hidden: Array) -> Array:
        """bf16 main_hidden [B,T,L*D] -> main_x bf16 [B,T,D], the same for every draft block (numerics.md 10).

        `weights` are those of the first draft block: `main_proj.weight`, `main_proj.scale`, `main_norm.weight`.
        """
        raise Unsupported("main_projection")

    def draft_embedding(self, config: Config, weight: Array, output_ids: Array) -> Array:
        """bf16 weight [V,D], int32 [B], the model's newest tokens -> what drafts begin as, bf16 [B,n,D] (10)."""
        raise Unsupported("draft_embedding")

    def draft_attention(
        self, config: Config, layer_id: int, weights: Weights, x: Array, ring: Array, start_pos: Array
    ) -> Array:
        """bf16 x [B,n,D] of the drafts at positions start_pos... (int64 [B]) -> bf16 [B,n,D] (numerics.md 10).

        bf16 ring [B,W,d] holds the rows of the model's positions before start_pos.
        """
        raise Unsupported("draft_attention")

    def draft_block(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """One draft block with its ring.  `weights` are those of the block (`attn.wq_a.weight`, ...).

        step(h bf16 [B,n,S,D], pre fp32 [B,n,S], main_x bf16 [B,T,D], start_pos int64 [B]) -> `h_out`, `pre_out`.
        start_pos is the first of the model's positions that main_x belongs to; the drafts stand behind the last.  A
        prefill (start_pos 0) only seeds the ring and returns nothing, or h and pre as given.  state() -> `window`.
        (numerics.md 10)
        """
        raise Unsupported("draft_block")

    def markov_bias(self, weights: Weights, previous_ids: Array) -> Array:
        """int32 [B], the tokens before a draft -> what they add to its logits, fp32 [B,V] (numerics.md 10).

        `weights` are those of the last draft block: `markov_head.embed.weight`, `markov_head.head.weight`.
        """
        raise Unsupported("markov_bias")

    def draft_confidence(self, weights: Weights, hidden: Array, previous_ids: Array) -> Array:
        """bf16 hidden [B,D], before the final norm, and int32 [B] -> raw confidence fp32 [B] (numerics.md 10).

        `weights` are those of the last draft block: `confidence_head.proj.weight`, `markov_head.embed.weight`.
        """
        raise Unsupported("draft_confidence")

    def draft_tokens(
        self, config: Config, weights: Weights, head_weight: Array, h: Array, pre: Array, output_ids: Array
    ) -> tuple[Array, Array, Array]:
        """The end of the draft head at temperature 0: ids int32 [B,1+n], logits fp32 [B,n,V], confidence fp32 [B,n].

        bf16 h [B,n,S,D] and fp32 pre [B,n,S] of the last draft block, whose `weights` these are; bf16 head_weight [V,D]
        and int32 output_ids [B] of the model.  The ids begin with output_ids; the logits include the Markov bias.
        (numerics.md 10)
        """
        raise Unsupported("draft_tokens")

    def dspark(self, config: Config, weights: Weights, batch_size: int) -> Stateful:
        """The draft head.  `weights` under checkpoint names: `embed.weight`, `head.weight`, `mtp.0...`.

        step(main_hidden bf16 [B,T,L*D], output_ids int32 [B], start_pos int64 [B]) -> `spec_ids`, `spec_logits`,
        `spec_confidence` as `draft_tokens`.  It follows the model's call at start_pos and is given what that left: the
        hidden states of its positions, and its newest tokens.  A prefill (start_pos 0) seeds the rings and need not
        return anything.  state() -> `layer{l}/window`.  (numerics.md 10)
        """
        raise Unsupported("dspark")

    def roll_back(self, target: Any, end: Array) -> None:
        """Forget the tokens of the last call of `target` from position `end` (int64 [B]) on: they were rejected.

        `target` is what this implementation made as `attention`, `block`, `stack`, `model`, `draft_block` or `dspark`.
        Its last call had T tokens at start_pos, the drafts to be verified among them, and start_pos < end <=
        start_pos + T.  Afterwards everything is as if the rejected tokens had never been given; the next call begins
        at `end`.  Asked for in the intended reading only.  (numerics.md 10.1)
        """
        raise Unsupported("roll_back")

    # vision ---------------------------------------------------------------------------------------------------------
    #
    # n patches and m aligner cells of several images follow one another, image by image; `grids` int64 [images, 2] says
    # how many rows and columns of patches each image has.  P is vision_patch_size, V vision_dim.

    def image_resize_plan(self, config: Config, width: int, height: int) -> tuple[Array, Array, Array, Array]:
        """Sizes for an image of width x height pixels, all int64, (rows, columns) where there are two (numerics.md 11).

        The canvas in pixels [2], its grid of patches [2], the aligner's grid [2], and the span's tokens [].
        """
        raise Unsupported("image_resize_plan")

    def image_patches(self, config: Config, pixels: Array) -> Array:
        """RGB pixels uint8 [height, width, 3] -> resized, padded, scaled, cut: bf16 [n,3,P,P] (numerics.md 11).

        Patches are row-major over the grid that `image_resize_plan` gives.
        """
        raise Unsupported("image_patches")

    def image_spans(self, config: Config, input_ids: Array, patch_grids: Array) -> tuple[Array, Array]:
        """A prompt with one image token an image -> the prompt with spans, and its token types (numerics.md 11).

        int32 input_ids [N], int64 patch_grids [images, 2] in the order of the image tokens -> input_ids and token types
        int32 [T] each: -1 text, 0 start, 1 image, 2 newline, 3 end.
        """
        raise Unsupported("image_spans")

    def merge_images(
        self, config: Config, weights: Weights, embedded: Array, token_types: Array, features: Array
    ) -> Array:
        """bf16 embedded [B,T,D], int32 token_types [B,T], bf16 aligner rows [m,D] -> bf16 [B,T,D] (numerics.md 11).

        The rows belong to the image tokens in their order, request by request.  `weights`: `image_start`,
        `image_newline`, `image_end` under checkpoint names.
        """
        raise Unsupported("merge_images")

    def patch_embedding(self, config: Config, weights: Weights, patches: Array) -> Array:
        """bf16 patches [n,3,P,P] -> bf16 [n,V].  `weights`: `proj.weight`, `proj.bias`  (numerics.md 11)."""
        raise Unsupported("patch_embedding")

    def vision_rotate(self, config: Config, x: Array, grids: Array) -> Array:
        """Turn queries or keys by row and column of their patch: bf16 [n,H,V/H] -> the same (numerics.md 11)."""
        raise Unsupported("vision_rotate")

    def vision_attention(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """bf16 x [n,V], already normed -> what is added to the residual, bf16 [n,V] (numerics.md 11).

        `weights`: `wqkv.weight`, `wqkv.bias`, `wo.weight`, `wo.bias`
        """
        raise Unsupported("vision_attention")

    def vision_mlp(self, config: Config, weights: Weights, x: Array) -> Array:
        """bf16 x [n,V], already normed -> bf16 [n,V].  `weights`: `w1.weight`, `w2.weight`  (numerics.md 11)."""
        raise Unsupported("vision_mlp")

    def vision_block(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """bf16 x [n,V] -> bf16 [n,V].  `weights`: `norm1.weight`, `attn.wqkv.weight`, ... (numerics.md 11)."""
        raise Unsupported("vision_block")

    def vision(self, config: Config, weights: Weights, patches: Array, grids: Array) -> Array:
        """The tower: bf16 patches [n,3,P,P] -> after the final norm, bf16 [n,V] (numerics.md 11).

        `weights`: `patch_embed.proj.weight`, `blocks.{i}.norm1.weight`, ..., `norm.weight`
        """
        raise Unsupported("vision")

    def aligner(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """bf16 x [n,V] of the tower -> rows of the language model, bf16 [m,D] (numerics.md 11).

        `weights`: `w1.weight`, `w1.bias`, `w2.weight`, `w2.bias`
        """
        raise Unsupported("aligner")

    # serving --------------------------------------------------------------------------------------------------------

    def save_state(self, target: Any) -> Any:
        """Keep the state of `target` aside, unmoved by what `target` does later (numerics.md 10.2).

        `target` is what this implementation made as `compressor`, `attention`, `block`, `stack` or `model`.  What is
        returned is opaque to the suite and handed to `restore_state`.
        """
        raise Unsupported("save_state")

    def restore_state(self, target: Any, saved: Any) -> None:
        """Put `target` into a saved state: its own, or that of another object made from the same arguments (10.2).

        A saved state may be restored more than once.
        """
        raise Unsupported("restore_state")

    # sampling -------------------------------------------------------------------------------------------------------

    def greedy(self, logits: Array) -> Array:
        """fp32 [B,V] -> int32 [B], a largest logit (numerics.md 9)."""
        raise Unsupported("greedy")

    def sample(self, logits: Array, temperature: float, exponentials: Array) -> Array:
        """fp32 logits and unit exponentials [B,V] -> int32 [B].

        The arg max of softmax(logits / temperature) / exponentials, or of the same in logarithms.  At temperature 0 it
        is `greedy`, whatever the exponentials.  (numerics.md 9)
        """
        raise Unsupported("sample")

    def draws(self, logits: Array, temperature: float, count: int, seed: int) -> Array:
        """fp32 [B,V] -> int32 [B,count], independent draws from softmax(logits / temperature), by any method.

        The seed makes them repeatable; they are judged as a distribution.  (numerics.md 9)
        """
        raise Unsupported("draws")

    def parameter_counts(self, config: Config) -> Mapping[str, int]:
        """Learned elements of the text path by unit, scales not counted, without allocating (numerics.md 0).

        Keys: `stream` (one sublayer), `norm`, `attention/{layer}`, `moe/{layer}`, `layer/{layer}` for every layer.
        """
        raise Unsupported("parameter_counts")


@dataclass(frozen=True)
class Method:
    """What the suite knows of an interface method: its component and its results in order."""

    component: str
    results: tuple[str, ...]


def _methods() -> dict[str, Method]:
    table: dict[str, dict[str, tuple[str, ...]]] = {
        "quantize": {
            "quantize_fp8": ("codes", "scales"),
            "quantize_fp4_e8m0": ("codes", "scales"),
            "quantize_fp4_e4m3": ("codes", "scales"),
            "fake_quantize_fp8": ("values",),
            "fake_quantize_fp4_e8m0": ("values",),
            "fake_quantize_fp4_e4m3": ("values",),
            "dequantize_fp8_weight": ("values",),
            "dequantize_fp4_weight": ("values",),
        },
        "linear": {
            "linear_fp8": ("out",),
            "linear_fp4": ("out",),
            "linear_bf16": ("out",),
            "linear_fp32": ("out",),
        },
        "norm": {"rms_norm": ("out",)},
        "rotary": {"rotary_frequencies": ("frequencies",), "rotary_tables": ("cos", "sin"), "rotate": ("out",)},
        "hyper_connections": {
            "hyper_connection_coefficients": ("pre", "post", "comb"),
            "hyper_connection_read": ("out",),
            "hyper_connection_write": ("out",),
        },
        "window": {"window_rows": ("window_rows",), "window_indices": ("indices",), "window_update": ("window",)},
        "compressor": {"compressed_rows": ("compressed_rows",), "compressor": ("latent",)},
        "indexer": {
            "index_keys": ("index_keys",),
            "index_queries": ("index_q",),
            "index_weights": ("index_weights",),
            "index_scores": ("index_score",),
            "select_positions": ("selected",),
        },
        "candidates": {"candidate_mask": ("candidates",)},
        "sparse_attention": {"sparse_attention": ("attn_o",)},
        "attention": {
            "query_latent": ("q_latent",),
            "attention_queries": ("attn_q",),
            "attention_output": ("attn_out",),
            "attention": ("attn_out",),
        },
        "gate": {"gate": ("gate_weights", "gate_indices")},
        "experts": {"expert": ("out",), "experts": ("ffn_out",)},
        "moe": {"moe": ("ffn_out",)},
        "engram": {
            "engram_layout": ("multipliers", "primes", "offsets"),
            "engram_hash": ("engram_hash",),
            "engram_write": ("engram_out",),
        },
        "block": {"block": ("h_out", "pre_out")},
        "stack": {"stack": ("h_out", "pre_out")},
        "model": {
            "embed": ("embed",),
            "head": ("final_norm", "logits"),
            "model": ("logits", "output_ids"),
            "parameter_counts": ("counts",),
            "save_state": (),
            "restore_state": (),
        },
        "vision": {
            "image_resize_plan": ("canvas", "patch_grid", "aligner_grid", "tokens"),
            "image_patches": ("patches",),
            "image_spans": ("input_ids", "token_types"),
            "merge_images": ("merged",),
            "patch_embedding": ("embedded",),
            "vision_rotate": ("rotated",),
            "vision_attention": ("attended",),
            "vision_mlp": ("out",),
            "vision_block": ("out",),
            "vision": ("vit_out",),
            "aligner": ("aligner_out",),
        },
        "dspark": {
            "main_hidden": ("main_hidden",),
            "main_projection": ("main_x",),
            "draft_embedding": ("embed",),
            "draft_attention": ("attn_out",),
            "draft_block": ("h_out", "pre_out"),
            "markov_bias": ("bias",),
            "draft_confidence": ("confidence",),
            "draft_tokens": ("spec_ids", "spec_logits", "spec_confidence"),
            "dspark": ("spec_ids", "spec_logits", "spec_confidence"),
            "roll_back": (),
        },
        "sampling": {"greedy": ("output_ids",), "sample": ("output_ids",), "draws": ("draws",)},
    }
    return {name: Method(component, results) for component, group in table.items() for name, results in group.items()}


METHODS: Mapping[str, Method] = _methods()
"""Every interface method that a case may call (`runtime` belongs to whichever stateful component it serves)."""

COMPONENTS: tuple[str, ...] = (
    "quantize",
    "linear",
    "norm",
    "rotary",
    "hyper_connections",
    "window",
    "compressor",
    "indexer",
    "candidates",
    "sparse_attention",
    "attention",
    "gate",
    "experts",
    "moe",
    "engram",
    "block",
    "stack",
    "model",
    "dspark",
    "vision",
    "sampling",
)
"""Components in the order of reports; the names of modules in `reference/` and `optimized/`."""
