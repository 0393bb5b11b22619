"""The stand-in's Engram: a module of its own that the model imports by its plain name."""

import torch
from kernel import act_quant, fp8_gemm
from torch import nn

from reference.engram import LookBack, engram_gate, hash_ids, look_back_ids
from reference.quantize import dequantize_fp8_rows


def frozen(*shape, dtype):
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Fp8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = frozen(outputs, inputs, dtype=torch.float8_e4m3fn)
        self.scale = frozen(-(-outputs // 32), -(-inputs // 32), dtype=torch.float8_e8m0fnu)

    def forward(self, x):
        codes, scale = act_quant(x, 32)
        return fp8_gemm(codes, scale, self.weight, self.scale)


class Table(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = frozen(rows, width, dtype=torch.float8_e4m3fn)
        self.scale = frozen(rows, width // 32, dtype=torch.float8_e8m0fnu)

    def forward(self, rows):
        fetched = self.weight.view(torch.uint8)[rows].view(self.weight.dtype)
        scale = self.scale.view(torch.uint8)[rows].view(self.scale.dtype)
        return dequantize_fp8_rows(fetched, scale)


class Engram(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        self.embed = Table(rows, config.engram_head_dim)
        features = config.engram_columns * config.engram_head_dim
        self.wkv = Fp8Linear(features, (config.hc_mult + 1) * config.dim)
        self.q_weight = frozen(config.hc_mult, config.dim, dtype=torch.bfloat16)
        self.k_weight = frozen(config.hc_mult, config.dim, dtype=torch.bfloat16)
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int64))

    def forward(self, h, input_ids, start_pos, image_mask):
        batch = h.shape[0]
        if start_pos == 0:
            self.look_back = LookBack(self.config, batch)
        ids, barrier = self.look_back.extend(input_ids, torch.full((batch,), start_pos), image_mask)
        rows = hash_ids(self.config, self.layer, look_back_ids(self.config, self.token_map, ids, barrier))
        projected = self.wkv(self.embed(rows).flatten(-2)).float()
        streams, dim = h.shape[-2:]
        key, value = projected.split([streams * dim, dim], dim=-1)
        wide = h.float()
        gate = engram_gate(
            self.config, wide, key.unflatten(-1, (streams, dim)), self.q_weight.float(), self.k_weight.float()
        )
        if image_mask is not None:
            gate = gate.masked_fill(image_mask.unsqueeze(-1), 0.0)
        return (wide + gate.unsqueeze(-1) * value.unsqueeze(-2)).bfloat16()
