"""Which compressed rows a query attends to: index scores, candidate blocks, selection (numerics.md 6.3)."""

import numpy as np

import linear
import quantize
import rotary
from quantize import bf16


def visible_counts(config, layer_id, positions):
    """How many compressed rows exist for the query at each position."""
    return (positions + 1) // config["compress_ratios"][layer_id]


def index_keys(config, layer_id, weights, latent, positions):
    """Keys of compressed rows, from the latent before its own rotation."""
    keys = linear.linear_bf16(latent, weights["indexer.wk.weight"])
    keys = linear.rms_norm(keys, weights["indexer.k_norm.weight"], config["norm_eps"])
    return quantize.fake_quantize_fp4_e8m0(rotary.rotate(config, layer_id, keys, positions))


def index_queries(config, layer_id, weights, q_latent, positions):
    """Index queries of every head."""
    queries = linear.linear_fp8(q_latent, weights["indexer.wq_b.weight"], weights["indexer.wq_b.scale"])
    queries = queries.reshape(*q_latent.shape[:2], config["index_n_heads"], config["index_head_dim"])
    return quantize.fake_quantize_fp4_e8m0(rotary.rotate(config, layer_id, queries, positions))


def index_weights(config, layer_id, weights, x):
    """The weight of each index head, both scale factors included."""
    factor = np.float32(config["index_head_dim"] ** -0.5 * config["index_n_heads"] ** -0.5)
    return bf16(linear.linear_bf16(x, weights["indexer.weights_proj.weight"]) * factor)


def index_scores(config, layer_id, queries, head_weights, keys, positions, candidates=None):
    """Weighted sum over heads of the positive parts, -inf where a row is not visible or not among the candidates."""
    dots = bf16(queries @ keys[:, None].swapaxes(-1, -2))
    weighted = bf16(np.maximum(dots, 0) * head_weights[..., None])
    scores = bf16(weighted.sum(axis=-2, dtype=np.float32))
    allowed = np.arange(keys.shape[1]) < visible_counts(config, layer_id, positions)[..., None]
    if candidates is not None:
        allowed &= candidates
    return np.where(allowed, scores, np.float32(-np.inf))


def select_positions(config, layer_id, scores, positions):
    """The rows with the best scores in ascending order, then -1."""
    count = min(config["index_topk"], scores.shape[-1])
    best = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :count], axis=-1)
    visible = best < visible_counts(config, layer_id, positions)[..., None]
    return np.where(visible, best, -1).astype(np.int32)


def candidate_mask(config, layer_id, scores, positions):
    """The rows of the best blocks; the block of the newest visible row is always among them."""
    size, rows = config["candidate_block_size"], scores.shape[-1]
    blocks = -(-rows // size)
    padded = np.full((*scores.shape[:-1], blocks * size), -np.inf, np.float32)
    padded[..., :rows] = scores
    block_scores = padded.reshape(*scores.shape[:-1], blocks, size).max(axis=-1)
    visible = visible_counts(config, layer_id, positions)[..., None]
    newest = (np.arange(blocks) == (visible - 1) // size) & (visible > 0)
    block_scores = np.where(newest, np.float32(np.inf), block_scores)
    rank = np.argsort(np.argsort(-block_scores, axis=-1, kind="stable"), axis=-1)
    kept = (rank < config["candidate_topk_blocks"]) & (block_scores > -np.inf)
    return np.repeat(kept, size, axis=-1)[..., :rows]
