"""A model of the declared shape on the declared kernels: what the tests record in place of the published code.

The text path, the vision tower and the draft head compute.
"""

from types import SimpleNamespace

import torch
from engram import Engram, Fp8Linear, frozen
from kernel import act_quant, fp4_act_quant, fp4_gemm, hc_split_sinkhorn, sparse_attn
from torch import nn
from torch.nn import functional
from vision import Aligner, Tower, place

from conformance.checkpoint_layout import DRAFT, TEXT, layout, scale_name
from reference.candidates import candidate_mask
from reference.compressor import pool_groups
from reference.config import Config
from reference.experts import clamped_swiglu
from reference.gate import gate
from reference.hyper_connections import hyper_connection_read, hyper_connection_write
from reference.indexer import index_scores, select_positions
from reference.norm import rms_norm
from reference.rotary import rotate
from reference.window import window_indices, window_update

shared_attn = SimpleNamespace(index_k=None, compressed=None, selected=None, candidates=None)


class ModelArgs(SimpleNamespace):
    pass


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.weight = frozen(width, dtype=torch.bfloat16)

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """Stored bf16 with a bf16 result, or stored fp32 with an fp32 result."""

    def __init__(self, inputs, outputs, dtype=torch.bfloat16):
        super().__init__()
        self.weight = frozen(outputs, inputs, dtype=dtype)

    def forward(self, x):
        return functional.linear(x.float(), self.weight.float()).to(self.weight.dtype)


class Fp4Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = frozen(outputs, inputs // 2, dtype=torch.int8)
        self.scale = frozen(outputs, inputs // 32, dtype=torch.float8_e8m0fnu)

    def forward(self, x):
        codes, scale = act_quant(x, 32)
        return fp4_gemm(codes, scale, self.weight, self.scale)


class Compressor(nn.Module):
    def __init__(self, config, ratio, max_batch):
        super().__init__()
        self.ratio = ratio
        dtype = torch.float32 if ratio > 1 else torch.bfloat16
        self.wkv = Linear(config.dim, config.head_dim, dtype)
        if ratio > 1:
            self.wgate = Linear(config.dim, config.head_dim, dtype)
            shape = (max_batch, ratio, config.head_dim)
            self.register_buffer("kv_state", torch.zeros(shape, dtype=dtype))
            self.register_buffer("score_state", torch.full(shape, -torch.inf, dtype=dtype))
        self.norm = Norm(config.head_dim, config.norm_eps)

    def forward(self, x, start_pos):
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        batch, length, _ = x.shape
        kv, score = self.wkv(x), self.wgate(x)
        kv_state, score_state = self.kv_state[:batch], self.score_state[:batch]
        if start_pos == 0:
            kv_state.zero_()
            score_state.fill_(-torch.inf)
            whole = length // self.ratio * self.ratio
            kv_state[:, : length - whole] = kv[:, whole:]
            score_state[:, : length - whole] = score[:, whole:]
            kv, score = kv[:, :whole], score[:, :whole]
        else:
            kv_state[:, start_pos % self.ratio] = kv[:, 0]
            score_state[:, start_pos % self.ratio] = score[:, 0]
            if (start_pos + 1) % self.ratio:
                return None
            kv, score = kv_state, score_state
        if not kv.shape[1]:
            return None
        return self.norm(pool_groups(kv.unflatten(1, (-1, self.ratio)), score.unflatten(1, (-1, self.ratio))))


class Indexer(nn.Module):
    def __init__(self, config, layer, args):
        super().__init__()
        self.config, self.layer = config, layer
        self.heads = (config.index_n_heads, config.index_head_dim)
        if config.owns_index(layer):
            self.wk = Linear(config.head_dim, config.index_head_dim)
            self.k_norm = Norm(config.index_head_dim, config.norm_eps)
            rows = args.max_seq_len // config.ratio(layer)
            cache = torch.zeros(args.max_batch_size, rows, config.index_head_dim, dtype=torch.bfloat16)
            self.register_buffer("k_cache", cache)
        self.wq_b = Fp8Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.weights_proj = Linear(config.dim, config.index_n_heads)

    def forward(self, x, qr, latent, positions, count):
        config, layer, batch = self.config, self.layer, x.shape[0]
        if latent is not None:
            first = count - latent.shape[1]
            rows = torch.arange(first, count).expand(batch, -1) * config.ratio(layer)
            keys = rotate(config, layer, self.k_norm(self.wk(latent)), rows)
            fp4_act_quant(keys, 32, inplace=True)
            self.k_cache[:batch, first:count] = keys
            shared_attn.index_k = self.k_cache[:batch, :count]
        if not count:
            shared_attn.selected = positions.new_zeros(*positions.shape, 0)
            return
        queries = rotate(config, layer, self.wq_b(qr).unflatten(-1, self.heads), positions)
        fp4_act_quant(queries, 32, inplace=True)
        weights = self.weights_proj(x) * (self.heads[1] ** -0.5 * self.heads[0] ** -0.5)
        mask = shared_attn.candidates if config.uses_candidates(layer) else None
        keys = shared_attn.index_k[:, :count]
        scores = index_scores(config, layer, queries, weights, keys, positions, mask)
        if config.publishes_candidates(layer):
            shared_attn.candidates = candidate_mask(config, layer, scores, positions)
        shared_attn.selected = select_positions(config, layer, scores, positions)


class Attention(nn.Module):
    def __init__(self, config, layer, args):
        super().__init__()
        self.config, self.layer, self.ratio = config, layer, config.ratio(layer)
        width = config.n_heads * config.head_dim
        self.wq_a = Fp8Linear(config.dim, config.q_lora_rank)
        self.q_norm = Norm(config.q_lora_rank, config.norm_eps)
        self.wq_b = Fp8Linear(config.q_lora_rank, width)
        self.wkv = Fp8Linear(config.dim, config.head_dim)
        self.kv_norm = Norm(config.head_dim, config.norm_eps)
        self.attn_sink = frozen(config.n_heads, dtype=torch.float32)
        self.wo_a = Linear(width // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = Fp8Linear(config.o_groups * config.o_lora_rank, config.dim)

        def cache(rows):
            return torch.zeros(args.max_batch_size, rows, config.head_dim, dtype=torch.bfloat16)

        self.register_buffer("kv_cache", cache(config.window_size))
        if config.compresses(layer):
            self.compressor = Compressor(config, self.ratio, args.max_batch_size)
            self.register_buffer("compressed", cache(args.max_seq_len // self.ratio))
        if config.selects(layer):
            self.indexer = Indexer(config, layer, args)

    def forward(self, x, start_pos):
        config, layer = self.config, self.layer
        batch, length, _ = x.shape
        positions = torch.arange(start_pos, start_pos + length).expand(batch, -1)
        qr = self.q_norm(self.wq_a(x))
        q = rotate(config, layer, self.wq_b(qr).unflatten(-1, (config.n_heads, config.head_dim)), positions)
        kv = rotate(config, layer, self.kv_norm(self.wkv(x)), positions)
        act_quant(kv, 32, inplace=True)
        ring = torch.zeros_like(self.kv_cache[:batch]) if start_pos == 0 else self.kv_cache[:batch]
        self.kv_cache[:batch] = window_update(config, ring, kv, start_pos)
        rows = kv if start_pos == 0 else self.kv_cache[:batch]
        listed = window_indices(config, start_pos, length).expand(batch, -1, -1)
        if self.ratio:
            count = (start_pos + length) // self.ratio
            latent = self._compress(x, start_pos, count) if config.compresses(layer) else None
            if config.selects(layer):
                self.indexer(x, qr, latent, positions, count)
            selected = shared_attn.selected
            shifted = torch.where(selected >= 0, selected + rows.shape[1], -1)
            listed = torch.cat((listed, shifted), dim=-1)
            rows = torch.cat((rows, shared_attn.compressed), dim=1)
        return self.project(sparse_attn(q, rows, self.attn_sink, listed, config.head_dim**-0.5), positions)

    def project(self, o, positions):
        config = self.config
        o = rotate(config, self.layer, o, positions, inverse=True)
        grouped = o.flatten(-2).unflatten(-1, (config.o_groups, -1)).float()
        by_group = self.wo_a.weight.unflatten(0, (config.o_groups, -1)).float()
        return self.wo_b(torch.einsum("btgd,grd->btgr", grouped, by_group).bfloat16().flatten(-2))

    def _compress(self, x, start_pos, count):
        latent = self.compressor(x, start_pos)
        if latent is not None:
            first = count - latent.shape[1]
            positions = torch.arange(first, count).expand(x.shape[0], -1) * self.ratio
            rows = rotate(self.config, self.layer, latent, positions)
            fp4_act_quant(rows, 16, inplace=True)
            self.compressed[: x.shape[0], first:count] = rows
        shared_attn.compressed = self.compressed[: x.shape[0], :count]
        return latent


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = frozen(config.n_routed_experts, config.dim, dtype=torch.bfloat16)
        self.bias = frozen(config.n_routed_experts, dtype=torch.float32)
        self.bias_vl = frozen(config.n_routed_experts, dtype=torch.float32)

    def forward(self, x, image_mask):
        weights = {"weight": self.weight, "bias": self.bias, "bias_vl": self.bias_vl}
        return gate(self.config, weights, x, image_mask)


class Expert(nn.Module):
    def __init__(self, config, linear, width):
        super().__init__()
        self.config = config
        self.w1, self.w3 = linear(config.dim, width), linear(config.dim, width)
        self.w2 = linear(width, config.dim)

    def forward(self, x, weights=None):
        hidden = clamped_swiglu(self.config, self.w1(x).float(), self.w3(x).float())
        return self.w2((hidden if weights is None else hidden * weights).bfloat16())


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Gate(config)
        width = config.moe_inter_dim
        self.experts = nn.ModuleList(Expert(config, Fp4Linear, width) for _ in range(config.n_routed_experts))
        self.shared_experts = Expert(config, Fp8Linear, width * config.n_shared_experts)

    def forward(self, x, image_mask):
        flat = x.flatten(0, 1)
        weights, indices = self.gate(flat, None if image_mask is None else image_mask.flatten())
        total = torch.zeros(flat.shape, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            token, choice = torch.nonzero(indices == number, as_tuple=True)
            if len(token):
                total.index_add_(0, token, expert(flat[token], weights[token, choice, None]).float())
        return (total + self.shared_experts(flat).float()).bfloat16().view(x.shape)


class Block(nn.Module):
    def __init__(self, config, layer, args):
        super().__init__()
        self.config = config
        if config.has_engram(layer):
            self.engram = Engram(config, layer)
        streams = config.hc_mult
        for sublayer in ("attn", "ffn"):
            rows = (2 + streams) * streams
            setattr(self, f"hc_{sublayer}_fn", frozen(rows, streams * config.dim, dtype=torch.float32))
            setattr(self, f"hc_{sublayer}_base", frozen(rows, dtype=torch.float32))
            setattr(self, f"hc_{sublayer}_scale", frozen(3, dtype=torch.float32))
        self.attn_norm, self.ffn_norm = (Norm(config.dim, config.norm_eps) for _ in range(2))
        self.attn, self.ffn = Attention(config, layer, args), MoE(config)

    def coefficients(self, h, fn, scale, base):
        flat = h.flatten(-2).float()
        mixes = functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.norm_eps)
        config = self.config
        return hc_split_sinkhorn(mixes, scale, base, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)

    def hc_post(self, y, h, post, comb):
        return hyper_connection_write(y, h, post, comb)

    def forward(self, h, pre, input_ids, start_pos, image_mask):
        if hasattr(self, "engram"):
            h = self.engram(h, input_ids, start_pos, image_mask)
        own, post, comb = self.coefficients(h, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        y = self.attn(self.attn_norm(hyper_connection_read(h, pre)), start_pos)
        h = self.hc_post(y, h, post, comb)
        handed_on, post, comb = self.coefficients(h, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        y = self.ffn(self.ffn_norm(hyper_connection_read(h, own)), image_mask)
        return self.hc_post(y, h, post, comb), handed_on


def entering(layer, h, input_ids, start_pos, image_mask):
    """Mean of the streams; target layers of the stand-in have no Engram."""
    assert not hasattr(layer, "engram")
    return h.float().mean(dim=2).bfloat16()


class DraftAttention(Attention):
    def forward(self, x, start_pos, main_x):
        config, layer, batch = self.config, self.layer, x.shape[0]
        positions = torch.arange(start_pos, start_pos + main_x.shape[1]).expand(batch, -1)
        ring = torch.zeros_like(self.kv_cache[:batch]) if start_pos == 0 else self.kv_cache[:batch]
        self.kv_cache[:batch] = window_update(config, ring, self.rows(main_x, positions), start_pos)
        if start_pos == 0:
            return x
        positions = start_pos + 1 + torch.arange(x.shape[1]).expand(batch, -1)
        heads = (config.n_heads, config.head_dim)
        q = rotate(config, layer, self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, heads), positions)
        seen = min(config.window_size, start_pos + 1)
        rows = torch.cat((self.kv_cache[:batch, :seen], self.rows(x, positions)), dim=1)
        listed = torch.arange(rows.shape[1]).expand(batch, x.shape[1], -1).int()
        return self.project(sparse_attn(q, rows, self.attn_sink, listed, config.head_dim**-0.5), positions)

    def rows(self, x, positions):
        kv = rotate(self.config, self.layer, self.kv_norm(self.wkv(x)), positions)
        act_quant(kv, 32, inplace=True)
        return kv


class DraftBlock(Block):
    def __init__(self, config, layer, args):
        drafts = config.of_drafts()
        super().__init__(drafts, layer, args)
        self.attn = DraftAttention(drafts, layer, args)
        if layer == config.n_layers:
            self.main_proj = Fp8Linear(len(config.dspark_target_layer_ids) * config.dim, config.dim)
            self.main_norm = Norm(config.dim, config.norm_eps)
        if layer == config.draft_layers[-1]:
            self.norm = Norm(config.dim, config.norm_eps)
            self.markov_head = nn.Module()
            self.markov_head.embed = Embedding(config, config.dspark_markov_rank)
            self.markov_head.head = Linear(config.dspark_markov_rank, config.vocab_size, torch.float32)
            self.confidence_head = nn.Module()
            self.confidence_head.proj = Linear(config.dim + config.dspark_markov_rank, 1, torch.float32)

    def forward(self, h, pre, start_pos, main_x):
        if start_pos == 0:
            return self.attn(h, start_pos, main_x), pre
        own, post, comb = self.coefficients(h, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        y = self.attn(self.attn_norm(hyper_connection_read(h, pre)), start_pos, main_x)
        h = self.hc_post(y, h, post, comb)
        handed_on, post, comb = self.coefficients(h, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        y = self.ffn(self.ffn_norm(hyper_connection_read(h, own)), None)
        return self.hc_post(y, h, post, comb), handed_on


class Embedding(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        self.weight = frozen(config.vocab_size, width or config.dim, dtype=torch.bfloat16)

    def forward(self, ids):
        return self.weight[ids]


def hold_other_parts(model, args):
    """Parameters of the parts that do not compute, under their names."""
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
    for name, parameter in layout(vars(args), "args").parameters.items():
        if parameter.part in (TEXT, DRAFT):
            continue
        form = parameter.forms[0]
        made = {name: frozen(*form.stored(parameter.shape), dtype=types[form.dtype])}
        if form.scale_tile:
            made[scale_name(name)] = frozen(*form.scale(parameter.shape), dtype=torch.float8_e8m0fnu)
        for full_name, value in made.items():
            *path, leaf = full_name.split(".")
            holder = model
            for step in path:
                if not hasattr(holder, step):
                    holder.add_module(step, nn.Module())
                holder = getattr(holder, step)
            holder.register_parameter(leaf, value)


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.config = config = Config.from_mapping(vars(args))
        self.embed = Embedding(config)
        self.layers = nn.ModuleList(Block(config, layer, args) for layer in range(config.n_layers))
        self.norm = Norm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size, torch.float32)
        if config.vision_n_layers:
            self.vision, self.aligner = Tower(config), Aligner(config)
        if config.n_mtp_layers:
            self.mtp = nn.ModuleList(DraftBlock(config, layer, args) for layer in config.draft_layers)
        hold_other_parts(self, args)

    def forward(self, input_ids, start_pos=0, images=None):
        h, image_mask = place(self, self.embed(input_ids), images)
        h = h.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        pre = torch.zeros(h.shape[:-1], dtype=torch.float32)
        pre[..., 0] = 1.0
        tapped = []
        for number, layer in enumerate(self.layers):
            if number in self.config.dspark_target_layer_ids:
                tapped.append(entering(layer, h, input_ids, start_pos, image_mask))
            h, pre = layer(h, pre, input_ids, start_pos, image_mask)
        self.main_hidden = torch.cat(tapped, dim=-1) if tapped else None
        return self.head(self.norm(hyper_connection_read(h, pre))[:, -1])

    def forward_spec(self, output_ids, start_pos):
        config, last = self.config, self.mtp[-1]
        main_x = self.mtp[0].main_norm(self.mtp[0].main_proj(self.main_hidden))
        ids = torch.full((len(output_ids), config.dspark_block_size), config.dspark_noise_token_id)
        ids[:, 0] = output_ids
        h = self.embed(ids).unsqueeze(2).repeat(1, 1, config.hc_mult, 1)
        pre = torch.zeros(h.shape[:-1], dtype=torch.float32)
        pre[..., 0] = 1.0
        for block in self.mtp:
            h, pre = block(h, pre, start_pos, main_x)
        if start_pos == 0:
            return None
        hidden = hyper_connection_read(h, pre)
        base = self.head(last.norm(hidden))
        found, logits, confidence = [output_ids.int()], [], []
        for draft in range(config.dspark_block_size):
            embedded = last.markov_head.embed(found[-1].long())
            logits.append(base[:, draft] + last.markov_head.head(embedded))
            confidence.append(last.confidence_head.proj(torch.cat((hidden[:, draft], embedded), dim=-1))[:, 0])
            found.append(logits[-1].argmax(dim=-1).int())
        return torch.stack(found, dim=1), torch.stack(logits, dim=1), torch.stack(confidence, dim=1)
