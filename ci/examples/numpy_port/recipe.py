"""Weights at the released sizes, made from a seed, a name and an index (fixtures/RECIPE.md)."""

import hashlib
import math

import numpy as np

from quantize import bf16, encode_e4m3

BELL_DEVIATION = 0.577


def stream(seed, name, count):
    """The first `count` outputs of splitmix64, from a key that is the hash of seed and name."""
    key = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"))
    z = key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def octets(seed, name, count):
    """Bytes of the stream, the least significant of each output first."""
    return stream(seed, name, -(-count // 8)).astype("<u8").view(np.uint8)[:count]


def bell(seed, name, count):
    """Bell-shaped whole numbers: four bytes each, summed, minus 510."""
    return octets(seed, name, 4 * count).reshape(-1, 4).sum(axis=1, dtype=np.int32) - 510


def exponent(gain, inputs, deviation):
    """Power of two that gives a matrix with so many inputs its gain."""
    return round(math.log2(gain / math.sqrt(inputs) / deviation))


def make(made):
    """A tensor from what a request says of it: name, seed, kind, shape, and gain or exponent."""
    seed, name, kind, shape = made["seed"], made["name"], made["kind"], made["shape"]
    count = math.prod(shape)
    if kind == "scale":
        steps = (stream(seed, name, count) % np.uint64(3)).astype(np.int64) - 1
        return (127 + made["exponent"] + steps).astype(np.uint8).reshape(shape)
    if kind == "fp4":
        return octets(seed, name, count // 2).reshape(*shape[:-1], -1)
    n = bell(seed, name, count).astype(np.float32).reshape(shape)
    if kind in ("fp8", "fp8row"):
        return encode_e4m3(n / 2)
    if kind in ("bf16", "fp32"):
        n = np.ldexp(n, exponent(made["gain"], shape[-1], BELL_DEVIATION) - 8)
        return as_bf16(n) if kind == "bf16" else n
    if kind in ("norm", "input"):
        return as_bf16(1 + n / 2048 if kind == "norm" else n / 256)
    return {"small": n / 1024, "scale3": np.float32(0.5) + n / 4096, "sink": n / 128}[kind]


def as_bf16(x):
    """The upper halves of float32 numbers, rounded."""
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16)
