"""The compressor: groups of tokens pooled into one row (numerics.md 6.2)."""

from __future__ import annotations

import torch

from reference.config import Config
from reference.linear import linear_bf16, linear_fp32
from reference.norm import rms_norm
from reference.parameters import Scoped, Weights
from reference.precision import to_bf16
from reference.quantize import fake_quantize_fp4_e4m3
from reference.rotary import rotate


def pool_groups(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Σ over a group of softmax(score) · kv, per feature: fp32 [B,n,r,d] twice -> bf16 [B,n,d] (numerics.md 6.2)."""
    return to_bf16((kv * torch.softmax(score, dim=2)).sum(dim=2))


def compressed_rows(
    config: Config,
    layer_id: int,
    latent: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Rows as cached: bf16 latent [B,n,d], int64 positions [B,n] of each group's first token -> bf16 [B,n,d].

    Rotated, then fake-quantised with Q4-E4M3 over the whole vector (numerics.md 6.2).
    """
    return fake_quantize_fp4_e4m3(rotate(config, layer_id, latent, positions, compute=compute))


class Compressor:
    """The compressor of one KV source, with the tokens of each request's unfinished group.

    The carry holds the projections `kv` and `score` of position p in slot p mod r.  A prefill stores its leftover
    tokens only; a continuing call stores every token.  Nothing is cleared when a group completes.
    """

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`weights` are those of the attention."""
        self.config = config
        self.ratio = config.ratio(layer_id)
        self.weights = Scoped(weights, "compressor")
        self.compute = compute
        shape = (batch_size, self.ratio, config.head_dim)
        self.carry_kv = torch.zeros(shape, dtype=compute)
        self.carry_score = torch.full(shape, -torch.inf, dtype=compute)
        self._last_call: tuple[torch.Tensor, ...] = ()

    def step(self, x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        """bf16 x [B,T,D], int64 start_pos [B] -> `latent` bf16 [B,n,d], absent when no group completes.

        n is the largest number of groups that any request completes; missing rows are zero (numerics.md 6.2).
        """
        if self.ratio == 1:
            pooled = linear_bf16(x, self.weights["wkv.weight"], compute=self.compute)
        else:
            pooled = self._pool(x, start_pos)
        if pooled.shape[1] == 0:
            return {}
        latent = rms_norm(pooled, self.weights["norm.weight"], self.config.norm_eps, compute=self.compute)
        return {"latent": latent}

    def _pool(self, x: torch.Tensor, start_pos: torch.Tensor) -> torch.Tensor:
        """bf16 x [B,T,D] -> pooled groups that this call completes, bf16 [B,n,d]."""
        batch_size, length, _ = x.shape
        batch = torch.arange(batch_size).unsqueeze(1)
        kv = linear_fp32(x, self.weights["wkv.weight"], compute=self.compute)
        score = linear_fp32(x, self.weights["wgate.weight"], compute=self.compute)

        # A request at position 0 begins with a fresh carry.
        fresh = (start_pos == 0)[:, None, None]
        carry_kv = self.carry_kv.masked_fill(fresh, 0.0)
        carry_score = self.carry_score.masked_fill(fresh, -torch.inf)

        # Line the tokens up behind those of the unfinished group, then cut the line into groups.
        waiting = start_pos % self.ratio
        groups = int((waiting.max() + length + self.ratio - 1) // self.ratio)
        place = waiting.unsqueeze(1) + torch.arange(length)
        line_kv = kv.new_zeros(batch_size, groups * self.ratio, kv.shape[-1])
        line_score = torch.full_like(line_kv, -torch.inf)
        line_kv[:, : self.ratio], line_score[:, : self.ratio] = carry_kv, carry_score
        line_kv[batch, place], line_score[batch, place] = kv, score
        completed = (waiting + length) // self.ratio
        n = int(completed.max())
        by_group = (groups, self.ratio)
        group_kv, group_score = torch.unflatten(line_kv, 1, by_group), torch.unflatten(line_score, 1, by_group)
        pooled = pool_groups(group_kv[:, :n], group_score[:, :n])
        exists = torch.arange(n) < completed.unsqueeze(1)

        self._last_call = (start_pos, carry_kv, carry_score, kv, score)
        carry_kv, carry_score = self._keep(torch.full_like(start_pos, length))
        self.carry_kv, self.carry_score = carry_kv, carry_score

        return pooled.masked_fill(~exists.unsqueeze(-1), 0.0)

    def _keep(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The carry after the first `lengths` [B] tokens of the last call: fp32 [B,r,d] twice.

        What stays is, of a prefill, the leftover tokens, and of a continuing call the last r tokens.
        """
        start_pos, carry_kv, carry_score, kv, score = self._last_call
        token, length = torch.arange(kv.shape[1]), lengths.unsqueeze(1)
        first_kept = torch.where(start_pos.unsqueeze(1) == 0, length // self.ratio * self.ratio, length - self.ratio)
        request, index = torch.nonzero((token >= first_kept) & (token < length), as_tuple=True)
        slot = (start_pos[request] + index) % self.ratio
        carry_kv, carry_score = carry_kv.clone(), carry_score.clone()
        carry_kv[request, slot], carry_score[request, slot] = kv[request, index], score[request, index]
        return carry_kv, carry_score

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1)."""
        if self.ratio > 1:
            self.carry_kv, self.carry_score = self._keep(end - self._last_call[0])

    def state(self) -> dict[str, torch.Tensor]:
        """`carry_kv` and `carry_score` fp32 [B,r,d]; nothing for ratio 1."""
        if self.ratio == 1:
            return {}
        return {"carry_kv": self.carry_kv, "carry_score": self.carry_score}
