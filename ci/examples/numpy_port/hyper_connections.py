"""Hyper-connections: how the residual streams are read, mixed and written (numerics.md 5)."""

import numpy as np

from quantize import bf16


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def sinkhorn(logits, rounds, eps):
    """Rows to one, columns to one, in turn, columns last; [..., summed stream, written stream]."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    comb = exponentials / exponentials.sum(axis=-1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return comb


def hyper_connection_coefficients(config, h, fn, scale, base):
    """Coefficients of one sublayer from the flattened streams, all in float32."""
    streams = h.shape[-2]
    eps = np.float32(config["hc_eps"])
    flat = h.reshape(*h.shape[:-2], -1)
    mean_square = np.square(flat).mean(axis=-1, keepdims=True, dtype=np.float32)
    mixes = (flat @ fn.T) / np.sqrt(mean_square + np.float32(config["norm_eps"]))
    pre = sigmoid(mixes[..., :streams] * scale[0] + base[:streams]) + eps
    post = 2 * sigmoid(mixes[..., streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    logits = (mixes[..., 2 * streams :] * scale[2] + base[2 * streams :]).reshape(*h.shape[:-2], streams, streams)
    return pre, post, sinkhorn(logits, config["hc_sinkhorn_iters"], eps)


def hyper_connection_read(h, pre):
    """A weighted sum of the streams."""
    return bf16((pre[..., None] * h).sum(axis=-2))


def hyper_connection_write(y, h, post, comb):
    """Each stream takes its part of y and a mix of the old streams: the sum runs over the first index of comb."""
    mixed = (comb[..., None] * h[..., :, None, :]).sum(axis=-3)
    return bf16(post[..., None] * y[..., None, :] + mixed)
