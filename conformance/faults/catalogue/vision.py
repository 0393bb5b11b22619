"""Mistakes in the vision tower and its aligner (numerics.md 11)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, Replace

V = "vision"
EMBEDDING, ROTATE, ANGLES = "vision.patch_embedding", "vision.vision_rotate", "vision.vision_angles"
ATTENTION, ATTEND, MLP, BLOCK = "vision.vision_attention", "vision._attend", "vision.vision_mlp", "vision.vision_block"
TOWER, ALIGNER, UNFOLD = "vision.vision", "vision.aligner", "vision._unfold"
PRODUCT = "functional.linear(x.to(compute), weight.to(compute), bias.to(compute))"
THIRDS = "(torch.unflatten(part, -1, heads) for part in qkv.chunk(3, dim=-1))"
PAD = "functional.pad(grid, (0, -width % ratio, 0, -height % ratio))"
PROBABILITIES = "torch.softmax((q @ k.mT) * scale, dim=-1)"
SILU = "functional.silu(gate.to(compute))"
GELU = "functional.gelu(hidden.to(compute))"
TURNED = "torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        V,
        "patch-channels-last",
        "patch-flattening",
        "A patch is flattened as (y, x, channel).",
        Edit(EMBEDDING, "patches.flatten(1)", "patches.permute(0, 2, 3, 1).flatten(1)"),
    ),
    Fault(
        V,
        "patch-transposed",
        "patch-flattening",
        "A patch is flattened as (channel, x, y).",
        Edit(EMBEDDING, "patches.flatten(1)", "patches.mT.flatten(1)"),
    ),
    Fault(
        V,
        "bias-missing",
        "vision-bias-missing",
        "Linear layers of the tower have no bias.",
        Edit("vision.linear_with_bias", ", bias.to(compute))", ")"),
    ),
    Fault(
        V,
        "qkv-bias-missing",
        "vision-bias-missing",
        "Queries, keys and values have no bias.",
        Edit(ATTENTION, 'weights["wqkv.bias"]', 'torch.zeros_like(weights["wqkv.bias"])'),
    ),
    Fault(
        V,
        "aligner-bias-missing",
        "vision-bias-missing",
        "The aligner's last layer has no bias.",
        Edit(ALIGNER, 'weights["w2.bias"]', 'torch.zeros_like(weights["w2.bias"])'),
    ),
    Fault(
        V,
        "bias-after-rounding",
        "vision-bias-rounded-apart",
        "The product is rounded before the bias is added.",
        Edit(
            "vision.linear_with_bias",
            f"to_bf16({PRODUCT})",
            "to_bf16(to_bf16(functional.linear(x.to(compute), weight.to(compute))).to(compute) + bias.to(compute))",
        ),
    ),
    Fault(
        V,
        "rows-and-columns-swapped",
        "vision-rotary-axes",
        "The first pairs turn by column, the others by row.",
        Edit(ANGLES, "row, column = patch_coordinates(grids)", "column, row = patch_coordinates(grids)"),
    ),
    Fault(
        V,
        "columns-first",
        "vision-rotary-axes",
        "Patches are numbered down the columns.",
        Edit(
            ANGLES,
            "row, column = patch_coordinates(grids)",
            "column, row = patch_coordinates(grids.flip(-1))",
        ),
    ),
    Fault(
        V,
        "axes-interleaved",
        "vision-rotary-axes",
        "Pairs turn by row and by column in turn.",
        Edit(
            ANGLES,
            "torch.cat((row.unsqueeze(-1) * frequencies, column.unsqueeze(-1) * frequencies), dim=-1)",
            "torch.stack((row.unsqueeze(-1) * frequencies, column.unsqueeze(-1) * frequencies), dim=-1).flatten(-2)",
        ),
    ),
    Fault(
        V,
        "one-dimensional",
        "vision-rotary-axes",
        "All pairs turn by the patch's number, as text does.",
        Edit(
            ANGLES,
            "row, column = patch_coordinates(grids)",
            "row = column = torch.cat([torch.arange(height * width) for height, width in grids.tolist()])",
        ),
    ),
    Fault(
        V,
        "neighbours-paired",
        "vision-rotary-pairing",
        "Neighbours are paired, as in the text model.",
        Edit(
            ROTATE,
            f"first, second = x.to(compute).chunk(2, dim=-1)\n    return to_bf16({TURNED})",
            "first, second = torch.unflatten(x.to(compute), -1, (-1, 2)).unbind(-1)\n"
            "    return to_bf16(torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2))",
        ),
    ),
    Fault(
        V,
        "quarters-paired",
        "vision-rotary-pairing",
        "Each half of a head is turned by itself: rows in the first, columns in the second.",
        Edit(
            ROTATE,
            f"first, second = x.to(compute).chunk(2, dim=-1)\n    return to_bf16({TURNED})",
            "first, second = (part.flatten(-2) for part in torch.unflatten(x.to(compute), -1, (2, 2, -1)).unbind(-2))\n"
            "    turned = torch.stack([torch.unflatten(part, -1, (2, -1)) for part in"
            " (first * cos - second * sin, first * sin + second * cos)], dim=-2)\n"
            "    return to_bf16(turned.flatten(-3))",
        ),
    ),
    Fault(
        V,
        "turned-backwards",
        "vision-rotary-direction",
        "Pairs turn by minus their angle.",
        Edit(ROTATE, "torch.cos(angles), torch.sin(angles)", "torch.cos(angles), -torch.sin(angles)"),
    ),
    Fault(
        V,
        "frequencies-over-the-head",
        "vision-rotary-base",
        "The exponent is divided by the head's width instead of half of it.",
        Edit(ANGLES, "dtype=torch.float32) / half", "dtype=torch.float32) / (2 * half)"),
    ),
    Fault(
        V,
        "base-of-compressed-layers",
        "vision-rotary-base",
        "The base is that of the text model's compressed layers.",
        Edit(ANGLES, "config.vision_rope_theta", "config.compress_rope_theta"),
    ),
    Fault(
        V,
        "places-not-restarted",
        "vision-rotary-places",
        "Rows are counted on from one image to the next.",
        Edit(
            "vision.patch_coordinates",
            "return torch.cat(rows), torch.cat(columns)",
            "starts = [0, *torch.cumsum(grids[:, 0], 0).tolist()]\n"
            "    return torch.cat([row + start for row, start in zip(rows, starts)]), torch.cat(columns)",
        ),
    ),
    Fault(
        V,
        "places-centred",
        "vision-rotary-places",
        "Places of a batch are taken from its largest image.",
        Edit(
            "vision.patch_coordinates",
            "torch.arange(width).repeat(height)",
            "(torch.arange(width) + grids[:, 1].max() - width).repeat(height)",
        ),
    ),
    Fault(
        V,
        "rotation-truncated",
        "bf16-truncated",
        "Rotated heads are cut to bf16.",
        Edit(ROTATE, "to_bf16(torch.cat", "arithmetic.truncate(torch.cat"),
    ),
    Fault(
        V,
        "attention-across-images",
        "vision-across-images",
        "All patches of a batch attend to one another.",
        Edit(ATTENTION, "lengths = grids.prod(dim=-1).tolist()", "lengths = [len(x)]"),
    ),
    Fault(
        V,
        "causal",
        "vision-mask",
        "The tower is causal.",
        Edit(
            ATTEND,
            PROBABILITIES,
            "torch.softmax(((q @ k.mT) * scale).masked_fill(\n"
            "        torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1), -torch.inf), dim=-1)",
        ),
    ),
    Fault(
        V,
        "last-patch-masked",
        "vision-mask",
        "The last patch is taken for padding.",
        Edit(
            ATTEND,
            PROBABILITIES,
            "torch.softmax(torch.cat((\n"
            "        (q @ k.mT)[..., :-1] * scale, torch.full((*q.shape[:2], 1), -1e30)), dim=-1), dim=-1)",
        ),
    ),
    Fault(
        V,
        "values-first",
        "vision-qkv-order",
        "The thirds are taken as values, keys, queries.",
        Edit(ATTENTION, "q, k, v = (torch", "v, k, q = (torch"),
    ),
    Fault(
        V,
        "heads-interleaved",
        "vision-qkv-order",
        "Each head's q, k and v are expected side by side.",
        Edit(ATTENTION, THIRDS, "torch.unflatten(qkv, -1, (heads[0], 3, heads[1])).unbind(-2)"),
    ),
    Fault(
        V,
        "probabilities-in-bf16",
        "vision-probabilities-rounded",
        "Probabilities are rounded, as in the text model's kernel.",
        Edit(ATTEND, PROBABILITIES, f"arithmetic.as_bf16({PROBABILITIES})"),
    ),
    Fault(
        V,
        "scores-in-bf16",
        "vision-probabilities-rounded",
        "Scores are rounded before the softmax.",
        Edit(ATTEND, "(q @ k.mT) * scale", "arithmetic.as_bf16(q @ k.mT) * scale"),
    ),
    Fault(
        V,
        "scale-of-all-heads",
        "vision-scale",
        "The scale is taken of the whole width.",
        Edit(ATTENTION, "heads[1] ** -0.5", "config.vision_dim ** -0.5"),
    ),
    Fault(
        V,
        "scale-missing",
        "vision-scale",
        "Scores are not scaled.",
        Edit(ATTENTION, "heads[1] ** -0.5", "1.0"),
    ),
    Fault(
        V,
        "up-before-gate",
        "vision-mlp-order",
        "The first half of w1 is taken for up.",
        Edit(MLP, "gate, up = linear_bf16", "up, gate = linear_bf16"),
    ),
    Fault(
        V,
        "gate-and-up-interleaved",
        "vision-mlp-order",
        "Rows of gate and up are expected in turn.",
        Edit(MLP, ".chunk(2, dim=-1)", ".unflatten(-1, (-1, 2)).unbind(-1)"),
    ),
    Fault(
        V,
        "gelu-in-mlp",
        "vision-activation",
        "The gate goes through GELU.",
        Edit(MLP, SILU, SILU.replace("silu", "gelu")),
    ),
    Fault(
        V,
        "clamped-swiglu",
        "vision-activation",
        "The gate is clamped as in the experts, but lower.",
        Edit(MLP, SILU, "functional.silu(gate.to(compute).clamp(max=2.0))"),
    ),
    Fault(
        V,
        "activation-not-rounded",
        "vision-rounding-missing",
        "silu(gate) stays in fp32.",
        Edit(MLP, f"to_bf16({SILU})", SILU),
    ),
    Fault(
        V,
        "mlp-without-residual",
        "vision-residual",
        "The feed-forward replaces the residual.",
        Edit(BLOCK, "return to_bf16(x.to(compute) + vision_mlp", "return to_bf16(0 * x.to(compute) + vision_mlp"),
    ),
    Fault(
        V,
        "residual-of-the-norm",
        "vision-residual",
        "The attention is added to the normed input.",
        Edit(BLOCK, "x = to_bf16(x.to(compute) + attended", "x = to_bf16(normed.to(compute) + attended"),
    ),
    Fault(
        V,
        "parallel-sublayers",
        "vision-residual",
        "The feed-forward reads what the attention read.",
        Edit(
            BLOCK,
            'normed = rms_norm(x, weights["norm2.weight"], NORM_EPS, compute=compute)\n    return',
            'normed = rms_norm(to_bf16(x.to(compute) - attended.to(compute)), weights["norm2.weight"], NORM_EPS,'
            " compute=compute)\n    return",
        ),
    ),
    Fault(
        V,
        "norms-swapped",
        "vision-norm-order",
        "norm2 stands before the attention.",
        Edit(BLOCK, 'weights["norm1.weight"]', 'weights["norm2.weight"]'),
    ),
    Fault(
        V,
        "norm-after-attention",
        "vision-norm-order",
        "The attention reads the residual as it is.",
        Edit(BLOCK, 'normed = rms_norm(x, weights["norm1.weight"], NORM_EPS, compute=compute)', "normed = x"),
    ),
    Fault(
        V,
        "norm-weight-in-bf16",
        "vision-norm-order",
        "A norm's weight is rounded to bf16.",
        Edit(BLOCK, 'weights["norm2.weight"]', 'to_bf16(weights["norm2.weight"])'),
    ),
    Fault(
        V,
        "eps-of-the-text-model",
        "vision-eps",
        "Norms of the tower take the text model's eps.",
        Replace("vision.NORM_EPS", 1e-20),
    ),
    Fault(
        V,
        "second-eps-of-the-text-model",
        "vision-eps",
        "The second norm takes the text model's eps.",
        Edit(BLOCK, 'weights["norm2.weight"], NORM_EPS', 'weights["norm2.weight"], config.norm_eps'),
    ),
    Fault(
        V,
        "final-norm-missing",
        "vision-final-norm",
        "The last block's output is handed on.",
        Edit(TOWER, 'rms_norm(x, weights["norm.weight"], NORM_EPS, compute=compute)', "x"),
    ),
    Fault(
        V,
        "last-block-skipped",
        "vision-block-order",
        "Features are taken before the last block, as other models do.",
        Edit(TOWER, "range(config.vision_n_layers)", "range(config.vision_n_layers - 1)"),
    ),
    Fault(
        V,
        "blocks-reversed",
        "vision-block-order",
        "Blocks run in descending order.",
        Edit(TOWER, "range(config.vision_n_layers)", "reversed(range(config.vision_n_layers))"),
    ),
    Fault(
        V,
        "padded-left-and-above",
        "aligner-padding",
        "An odd grid is padded at the left and above.",
        Edit(UNFOLD, PAD, "functional.pad(grid, (-width % ratio, 0, -height % ratio, 0))"),
    ),
    Fault(
        V,
        "padded-with-the-edge",
        "aligner-padding",
        "An odd grid is padded with its last row and column.",
        Edit(UNFOLD, PAD, 'functional.pad(grid[None], (0, -width % ratio, 0, -height % ratio), mode="replicate")[0]'),
    ),
    Fault(
        V,
        "padded-with-ones",
        "aligner-padding",
        "An odd grid is padded with ones.",
        Edit(UNFOLD, PAD, "functional.pad(grid, (0, -width % ratio, 0, -height % ratio), value=1.0)"),
    ),
    Fault(
        V,
        "patches-last-in-cell",
        "aligner-order",
        "A cell is flattened as (dy, dx, channel).",
        Edit(UNFOLD, "permute(1, 3, 0, 2, 4)", "permute(1, 3, 2, 4, 0)"),
    ),
    Fault(
        V,
        "cell-transposed",
        "aligner-order",
        "A cell is flattened as (channel, dx, dy).",
        Edit(UNFOLD, "permute(1, 3, 0, 2, 4)", "permute(1, 3, 0, 4, 2)"),
    ),
    Fault(
        V,
        "cells-by-column",
        "aligner-order",
        "Cells follow one another column by column.",
        Edit(UNFOLD, "permute(1, 3, 0, 2, 4)", "permute(3, 1, 0, 2, 4)"),
    ),
    Fault(
        V,
        "gelu-by-tanh",
        "aligner-activation",
        "GELU is approximated with tanh.",
        Edit(ALIGNER, GELU, 'functional.gelu(hidden.to(compute), approximate="tanh")'),
    ),
    Fault(
        V,
        "gelu-by-sigmoid",
        "aligner-activation",
        "GELU is approximated as x times the sigmoid of 1.702 x.",
        Edit(ALIGNER, GELU, "hidden.to(compute) * torch.sigmoid(1.702 * hidden.to(compute))"),
    ),
)
