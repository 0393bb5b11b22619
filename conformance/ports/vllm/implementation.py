"""vLLM as an implementation under test: each method runs vLLM's own function on the suite's arguments."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from conformance.interface import Array, Config, Description, Stateful, Unsupported, Weights
from conformance.ports.vllm.operations import LATENT, Operations
from conformance.ports.vllm.parts import COMMON, VLLM

ENGRAM = f"{COMMON}.engram"
GATE_FLOOR = 1e-6
"""As vLLM's layer has it."""


class Vllm(Operations):
    """Parts of DeepSeek-V4.1 in vLLM, on the CPU: torch functions as they are, Triton kernels interpreted."""

    def describe(self) -> Description:
        """The version, and what of it runs."""
        return Description(
            name="vllm",
            version=importlib.metadata.version("vllm"),
            homepage="github.com/vllm-project/vllm",
            conventions={
                "what runs": "single modules without the engine; nothing that needs CUDA",
                "kernels": "Triton's interpreter with this suite's repairs",
                "fp8 linears": "the emulation, the only form without a GPU; other forms quantise their inputs",
                "compressor": "narrow rows are repeated to the 512 features that the kernel is for",
            },
            deviations=("no-activation-quantiser",),
        )

    # compressor -----------------------------------------------------------------------------------------------------

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """The kernel that pools, norms and keeps open groups; the projection before it is a product in fp32."""
        ratio, width = config["compress_ratios"][layer_id], config["head_dim"]
        if ratio not in (1, 2) or LATENT % width:
            raise Unsupported(f"vllm: ratios 1 and 2, rows of {LATENT} features or a whole part of them")
        return _Compressor(config, ratio, weights, batch_size)

    # engram ---------------------------------------------------------------------------------------------------------

    def engram_layout(self, config: Config) -> tuple[Array, Array, Array]:
        """Drawn from the configuration."""
        layout, multipliers = _layout(config)
        return multipliers, torch.tensor(layout.primes), layout.offsets

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """The hash kernel, all requests from position 0 in one batch; rows are int32 there."""
        layout, multipliers = _layout(config)
        batch, length = input_ids.shape
        depth = layout.max_ngram_size - 1
        state = SimpleNamespace(
            use_slot_cache=False,
            block_size=1,
            token_map=token_map,
            pad_id=int(token_map[config["engram_pad_id"]]),
            multipliers=multipliers,
            primes=torch.tensor(layout.primes),
            offsets=layout.offsets,
        )
        dead = torch.zeros(batch, length, dtype=torch.bool) if image_mask is None else image_mask
        hashes = VLLM.function(ENGRAM, "NgramHashState").forward(
            state,
            input_ids.reshape(-1),
            torch.arange(length).repeat(batch),
            torch.arange(batch + 1, dtype=torch.int32) * length,
            dead.reshape(-1),
            torch.full((batch, depth), -1, dtype=torch.int32),
            torch.zeros(batch, depth, dtype=torch.bool),
            None,
            None,
        )
        result: Array = hashes[:, config["engram_layer_ids"].index(layer_id)].reshape(batch, length, -1).long()
        return result

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """The lookup kernel, the emulated FP8 linear, the gate kernel."""
        streams, width = h.shape[-2:]
        layer = SimpleNamespace(
            _batch=None,
            embed=lambda ids: _lookup(weights["embed.weight"], weights["embed.scale"], ids),
            wkv=lambda x: self.linear_fp8(x, weights["wkv.weight"], weights["wkv.scale"]),
            use_sequence_parallel=False,
            hc_mult=streams,
            dim=width,
            q_weight=weights["q_weight"],
            k_weight=weights["k_weight"],
            eps=config["norm_eps"],
            clamp_value=GATE_FLOOR,
        )
        written = VLLM.function(ENGRAM, "Engram").forward(
            layer,
            h.reshape(-1, streams, width).contiguous(),
            rows.reshape(-1, rows.shape[-1]),
            None if image_mask is None else ~image_mask.reshape(-1),
        )
        result: Array = written.reshape(h.shape)
        return result


class _Compressor(Stateful):
    """The kernel with its ring, in which position p of a request is in row p mod ratio."""

    def __init__(self, config: Config, ratio: int, weights: Weights, batch_size: int) -> None:
        names = ("wkv",) if ratio == 1 else ("wkv", "wgate")
        self._projections = [weights[f"compressor.{name}.weight"].float() for name in names]
        self._ratio, self._width, self._eps = ratio, config["head_dim"], config["norm_eps"]
        self._norm = self._repeated(weights["compressor.norm.weight"])
        self._ring = torch.zeros(batch_size, ratio, 2 * LATENT)
        self._ring[..., LATENT:] = -torch.inf

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        """The features as often as they fit into a latent: their mean square stays what it is."""
        return x.repeat(*[1] * (x.dim() - 1), LATENT // self._width)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`latent` where groups complete, zeros for a request that completes fewer than another."""
        x, starts = inputs["x"], inputs["start_pos"]
        batch, length, _ = x.shape
        positions = starts[:, None] + torch.arange(length)
        ends = (positions + 1) % self._ratio == 0
        projected = [x.float().reshape(batch * length, -1) @ weight.T for weight in self._projections]
        latent = torch.empty(batch * length, LATENT, dtype=torch.bfloat16)
        requests = torch.arange(batch, dtype=torch.int32)
        VLLM.function(f"{COMMON}.ops.fused_compress_quant_cache", "fused_save_compress_norm")(
            torch.cat([self._repeated(part) for part in projected], dim=-1),
            positions.reshape(-1),
            self._ring,
            (requests[:, None] * self._ratio + positions % self._ratio).reshape(-1),
            torch.arange(batch + 1, dtype=torch.int32) * length,
            requests.repeat_interleave(length),
            self._norm,
            self._eps,
            self._ratio,
            latent,
        )
        by_request = latent[:, : self._width].reshape(batch, length, -1)
        completed = [rows[whole] for rows, whole in zip(by_request, ends, strict=True)]
        rows = torch.nn.utils.rnn.pad_sequence(completed, batch_first=True)
        return {"latent": rows} if rows.shape[1] else {}

    def state(self) -> Mapping[str, Array]:
        """The ring."""
        if self._ratio == 1:
            return {}
        kv, score = (part[..., : self._width].clone() for part in self._ring.chunk(2, dim=-1))
        return {"carry_kv": kv, "carry_score": score}


def _layout(config: Config) -> tuple[Any, torch.Tensor]:
    """vLLM's layout of a configuration and its multipliers [L, max_ngram]."""
    settings = SimpleNamespace(**config, engram_pad_token_id=config["engram_pad_id"])
    layout = VLLM.function(ENGRAM, "EngramLayout").from_config(settings)
    if layout is None:
        raise Unsupported("vllm: a layout of no layers")
    multipliers = VLLM.function(ENGRAM, "compute_hash_multipliers")(
        layout.layer_ids, layout.max_ngram_size, layout.compressed_vocab_size
    )
    return layout, multipliers


def _lookup(weight: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bf16 [N, columns, d] of a table's rows at int64 ids [N, columns], as a table that one rank has whole."""
    rows, width = weight.shape
    columns = ids.shape[1]
    table = SimpleNamespace(
        _storage=lambda: (weight.contiguous(), scale.view(torch.uint8).contiguous()),
        _packed=None,
        _num_sms=1,
        part_n_hash_cols=columns,
        n_hash_cols=columns,
        head_start=0,
        cpu_offload=False,
        peer_rows=0,
        vocab_start_idx=0,
        vocab_end_idx=rows,
        dim=width,
        block_size=width // scale.shape[1],
    )
    out = torch.empty(len(ids), columns, width, dtype=torch.bfloat16)
    VLLM.function(ENGRAM, "ParallelEngramEmbedding").lookup(table, ids, out)
    return out
