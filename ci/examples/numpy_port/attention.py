"""Window, compressor, sparse attention and the attention of a layer (numerics.md 6)."""

import numpy as np

import indexer
import linear
import quantize
import rotary
from quantize import bf16


class Unsupported(Exception):
    """Something that this port does not have; reported as such, never guessed."""


# window


def window_rows(config, layer_id, weights, x, positions):
    """Key = value rows of the window."""
    rows = linear.linear_fp8(x, weights["wkv.weight"], weights["wkv.scale"])
    rows = linear.rms_norm(rows, weights["kv_norm.weight"], config["norm_eps"])
    return quantize.fake_quantize_fp8(rotary.rotate(config, layer_id, rows, positions))


def window_indices(config, start_pos, length):
    """Rows that each query attends to: rows of this call in a prefill, slots of the ring in a decode step."""
    window = config["window_size"]
    if start_pos == 0:
        last = np.arange(length)[:, None]
        listed = np.maximum(last - window + 1, 0) + np.arange(min(length, window))
        return np.where(listed <= last, listed, -1).astype(np.int32)
    if length != 1:
        raise Unsupported("several tokens after position 0")
    positions = start_pos - window + 1 + np.arange(window)  # oldest to newest
    return np.where(positions >= 0, positions % window, -1).astype(np.int32)[None]


def window_update(config, ring, rows, start_pos):
    """Position p goes to slot p mod W; of a long call only the last W rows stay."""
    window, length = config["window_size"], rows.shape[1]
    kept = np.arange(max(length - window, 0), length)
    updated = ring.copy()
    updated[:, (start_pos + kept) % window] = rows[:, kept]
    return updated


# compressor


def compressed_rows(config, layer_id, latent, positions):
    """What the cache holds: rotated by the position of the group's first token, through fake FP4."""
    return quantize.fake_quantize_fp4_e4m3(rotary.rotate(config, layer_id, latent, positions))


def start_of(start_pos, length):
    """The position at which all requests of the batch stand."""
    start = int(start_pos[0])
    if (start_pos != start).any():
        raise Unsupported("requests at different positions")
    if start > 0 and length != 1:
        raise Unsupported("several tokens after position 0")
    return start


class Compressor:
    """Pools groups of `ratio` tokens; what waits for its group to complete is the carry."""

    def __init__(self, config, layer_id, weights, batch_size):
        self.config, self.weights = config, weights
        self.ratio, self.batch = config["compress_ratios"][layer_id], batch_size
        self.begin()

    def begin(self):
        """Nothing waits before position 0."""
        shape = (self.batch, self.ratio, self.config["head_dim"])
        self.carry_kv = np.zeros(shape, np.float32)
        self.carry_score = np.full(shape, -np.inf, np.float32)

    def step(self, x, start_pos):
        """The latents of the groups that this call completes."""
        start, length = start_of(start_pos, x.shape[1]), x.shape[1]
        if start == 0:
            self.begin()
        if self.ratio == 1:
            return {"latent": self.normed(linear.linear_bf16(x, self.weights["compressor.wkv.weight"]))}
        kv = linear.linear_fp32(x, self.weights["compressor.wkv.weight"])
        score = linear.linear_fp32(x, self.weights["compressor.wgate.weight"])
        if start > 0:
            self.carry_kv[:, start % self.ratio] = kv[:, 0]
            self.carry_score[:, start % self.ratio] = score[:, 0]
            if (start + 1) % self.ratio:
                return {}
            return {"latent": self.normed(pool(self.carry_kv[:, None], self.carry_score[:, None]))}
        whole = length - length % self.ratio
        self.carry_kv[:, : length - whole] = kv[:, whole:]
        self.carry_score[:, : length - whole] = score[:, whole:]
        if whole == 0:
            return {}
        groups = (x.shape[0], whole // self.ratio, self.ratio, -1)
        return {"latent": self.normed(pool(kv[:, :whole].reshape(groups), score[:, :whole].reshape(groups)))}

    def normed(self, rows):
        """RMSNorm of bf16 rows."""
        return linear.rms_norm(rows, self.weights["compressor.norm.weight"], self.config["norm_eps"])

    def state(self):
        """The carry; with groups of one token nothing ever waits."""
        return {"carry_kv": self.carry_kv, "carry_score": self.carry_score} if self.ratio > 1 else {}


def pool(kv, score):
    """Softmax over the tokens of a group, feature by feature: [B, n, r, d] -> [B, n, d]."""
    weights = np.exp(score - score.max(axis=2, keepdims=True))
    return bf16((weights / weights.sum(axis=2, keepdims=True) * kv).sum(axis=2))


# sparse attention


def sparse_attention(q, kv, indices, sink, scale):
    """Softmax over the listed rows and a sink, in blocks of 64 rows with a running maximum."""
    request = np.arange(q.shape[0])[:, None, None]
    largest = np.full(q.shape[:3], -1e30, np.float32)
    total = np.zeros(q.shape[:3], np.float32)
    out = np.zeros(q.shape, np.float32)
    for begin in range(0, indices.shape[-1], 64):
        listed = indices[..., begin : begin + 64]
        rows = np.where(listed[..., None] >= 0, kv[request, listed], np.float32(0))
        scores = (q @ rows.swapaxes(-1, -2)) * np.float32(scale)
        scores = np.where(listed[:, :, None] >= 0, scores, np.float32(-np.inf))
        previous, largest = largest, np.maximum(largest, scores.max(axis=-1))
        shrink = np.exp(previous - largest)
        weights = np.exp(scores - largest[..., None])
        total = total * shrink + weights.sum(axis=-1)
        out = out * shrink[..., None] + bf16(weights) @ rows
    total = total + np.exp(sink - largest)
    return bf16(out / total[..., None])


# attention


def query_latent(config, layer_id, weights, x):
    """The narrow latent that queries and index queries come from."""
    latent = linear.linear_fp8(x, weights["wq_a.weight"], weights["wq_a.scale"])
    return linear.rms_norm(latent, weights["q_norm.weight"], config["norm_eps"])


def attention_queries(config, layer_id, weights, q_latent, positions):
    """Rotated heads."""
    q = linear.linear_fp8(q_latent, weights["wq_b.weight"], weights["wq_b.scale"])
    q = q.reshape(*q_latent.shape[:2], config["n_heads"], config["head_dim"])
    return rotary.rotate(config, layer_id, q, positions)


def attention_output(config, layer_id, weights, o, positions):
    """Turned back by the query's own position, projected by group, then together."""
    o = rotary.rotate(config, layer_id, o, positions, inverse=True)
    groups = config["o_groups"]
    o = o.reshape(*o.shape[:2], groups, 1, -1)
    projections = weights["wo_a.weight"].reshape(groups, config["o_lora_rank"], -1)
    narrow = bf16(o @ projections.swapaxes(-1, -2)).reshape(*o.shape[:2], -1)
    return linear.linear_fp8(narrow, weights["wo_b.weight"], weights["wo_b.scale"])


class Runtime:
    """What the layers of one batch of requests share: each slot is overwritten by the next source."""

    def __init__(self, config, batch_size, reading):
        if reading != "intended":
            raise Unsupported("only the intended reading of the index keys")
        self.compressed = self.index_keys = self.selected = self.candidates = None


class Attention:
    """The attention of one layer, whatever its role."""

    def __init__(self, config, layer_id, weights, runtime, batch_size):
        self.config, self.layer_id, self.weights, self.runtime = config, layer_id, weights, runtime
        self.ratio = config["compress_ratios"][layer_id]
        self.compresses, self.batch = layer_id in config["kv_source_layers"], batch_size
        self.compressor = Compressor(config, layer_id, weights, batch_size) if self.compresses else None
        self.begin()

    def begin(self):
        """Empty caches: a call at position 0 begins another request."""
        self.ring = np.zeros((self.batch, self.config["window_size"], self.config["head_dim"]), np.float32)
        self.compressed = np.zeros((self.batch, 0, self.config["head_dim"]), np.float32)
        self.index_keys = np.zeros((self.batch, 0, self.config["index_head_dim"]), np.float32)

    def step(self, x, start_pos):
        """One call: a prefill at position 0, or one token."""
        config, layer_id, weights = self.config, self.layer_id, self.weights
        batch, length = x.shape[:2]
        start = start_of(start_pos, length)
        if start == 0:
            self.begin()
        positions = np.broadcast_to(start + np.arange(length), (batch, length))
        q_latent = query_latent(config, layer_id, weights, x)
        q = attention_queries(config, layer_id, weights, q_latent, positions)
        rows = window_rows(config, layer_id, weights, x, positions)
        self.ring = window_update(config, self.ring, rows, start)
        kv = rows if start == 0 else self.ring
        listed = window_indices(config, start, length)
        indices = np.broadcast_to(listed, (batch, *listed.shape))
        if self.compresses:
            self.compress(x, start_pos, start)
        if self.ratio:
            if layer_id in config["index_source_layers"]:
                self.select(x, q_latent, positions)
            selected = self.runtime.selected
            shifted = np.where(selected >= 0, selected + kv.shape[1], -1)
            kv = np.concatenate([kv, self.runtime.compressed], axis=1)
            indices = np.concatenate([indices, shifted], axis=-1)
        o = sparse_attention(q, kv, indices, weights["attn_sink"], config["head_dim"] ** -0.5)
        return {"attn_out": attention_output(config, layer_id, weights, o, positions)}

    def compress(self, x, start_pos, start):
        """Append the rows and index keys of completed groups and publish all of them."""
        latent = self.compressor.step(x, start_pos).get("latent")
        if latent is not None:
            first = self.compressed.shape[1] + np.arange(latent.shape[1])
            positions = np.broadcast_to(first * self.ratio, latent.shape[:2])
            new_rows = compressed_rows(self.config, self.layer_id, latent, positions)
            new_keys = indexer.index_keys(self.config, self.layer_id, self.weights, latent, positions)
            self.compressed = np.concatenate([self.compressed, new_rows], axis=1)
            self.index_keys = np.concatenate([self.index_keys, new_keys], axis=1)
        self.runtime.compressed, self.runtime.index_keys = self.compressed, self.index_keys

    def select(self, x, q_latent, positions):
        """Score the shared index keys with this layer's own queries and publish the selection."""
        config, layer_id, runtime = self.config, self.layer_id, self.runtime
        queries = indexer.index_queries(config, layer_id, self.weights, q_latent, positions)
        head_weights = indexer.index_weights(config, layer_id, self.weights, x)
        restricted = runtime.candidates if layer_id > config["candidate_source_layer"] else None
        scores = indexer.index_scores(
            config, layer_id, queries, head_weights, runtime.index_keys, positions, restricted
        )
        if layer_id == config["candidate_source_layer"]:
            runtime.candidates = indexer.candidate_mask(config, layer_id, scores, positions)
        runtime.selected = indexer.select_positions(config, layer_id, scores, positions)

    def state(self):
        """The ring and, for sources, everything they have published and what waits."""
        if not self.compresses:
            return {"window": self.ring}
        caches = {"window": self.ring, "compressed": self.compressed, "index_keys": self.index_keys}
        return {**caches, **self.compressor.state()}
