"""Mistakes of what the draft head is given and of its blocks (numerics.md 10)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

D = "dspark"
HIDDEN = "model.main_hidden"
TAPPED = "residuals[:, :, list(config.dspark_target_layer_ids)]"
MEAN = "tapped.to(compute).mean(dim=-2)"
PROJECTION = "dspark.main_projection"
NORMED = 'rms_norm(projected, weights["main_norm.weight"], config.norm_eps, compute=compute)'
EMBEDDING = "dspark.draft_embedding"
INDICES = "dspark.draft_indices"
ATTENTION = "dspark.draft_attention_taps"
POSITIONS = "start_pos.unsqueeze(1) + torch.arange(x.shape[1])"
SEED = "dspark.DraftAttention.seed"
BLOCK = "dspark.DraftBlock.step"

FAULTS: tuple[Fault, ...] = (
    Fault(
        D,
        "target-layers-one-later",
        "draft-target-layers",
        "Target layers are counted from 1.",
        Edit(HIDDEN, TAPPED, "residuals[:, :, [i - 1 for i in config.dspark_target_layer_ids]]"),
    ),
    Fault(
        D,
        "last-target-only",
        "draft-target-layers",
        "The last target layer stands in for all.",
        Edit(
            HIDDEN,
            TAPPED,
            "residuals[:, :, [config.dspark_target_layer_ids[-1]] * len(config.dspark_target_layer_ids)]",
        ),
    ),
    Fault(
        D,
        "targets-in-reverse",
        "draft-target-order",
        "The last target layer comes first.",
        Edit(HIDDEN, TAPPED, "residuals[:, :, list(config.dspark_target_layer_ids)[::-1]]"),
    ),
    Fault(
        D,
        "targets-interleaved",
        "draft-target-order",
        "Features of the target layers are interleaved instead of put side by side.",
        Edit(HIDDEN, f"to_bf16({MEAN}).flatten(-2)", f"to_bf16({MEAN}).transpose(-1, -2).flatten(-2)"),
    ),
    Fault(
        D,
        "target-outputs",
        "draft-target-output",
        "Layers are tapped where they end.",
        Edit(HIDDEN, TAPPED, "residuals.roll(-1, 2)[:, :, list(config.dspark_target_layer_ids)]"),
    ),
    Fault(
        D,
        "streams-summed",
        "draft-streams-mean",
        "Streams are added.",
        Edit(HIDDEN, MEAN, "tapped.to(compute).sum(dim=-2)"),
    ),
    Fault(
        D,
        "first-stream",
        "draft-streams-mean",
        "The first stream stands in for the mean.",
        Edit(HIDDEN, MEAN, "tapped.to(compute)[..., 0, :]"),
    ),
    Fault(
        D,
        "streams-added-in-bf16",
        "draft-streams-mean",
        "Streams are added one by one in bf16.",
        Edit(HIDDEN, MEAN, "(((tapped[..., 0, :] + tapped[..., 1, :]) + tapped[..., 2, :]) + tapped[..., 3, :]) / 4"),
    ),
    Fault(D, "main-norm-missing", "draft-main-norm", "main_x is not normed.", Edit(PROJECTION, NORMED, "projected")),
    Fault(
        D,
        "hidden-normed-instead",
        "draft-main-norm",
        "The hidden states are normed before the projection, not after it.",
        Edit(
            PROJECTION,
            "linear_fp8(main_hidden,",
            "linear_fp8(rms_norm(main_hidden, torch.ones(main_hidden.shape[-1]), config.norm_eps),",
        ),
    ),
    Fault(
        D,
        "noise-only",
        "draft-first-token",
        "All drafts begin as noise.",
        Edit(EMBEDDING, "ids[:, 0] = output_ids", "pass"),
    ),
    Fault(
        D,
        "newest-token-last",
        "draft-first-token",
        "The newest token stands behind the noise.",
        Edit(EMBEDDING, "ids[:, 0] = output_ids", "ids[:, -1] = output_ids"),
    ),
    Fault(
        D,
        "newest-token-repeated",
        "draft-noise-token",
        "All drafts begin as the newest token.",
        Edit(EMBEDDING, "ids[:, 0] = output_ids", "ids[:] = output_ids.unsqueeze(1)"),
    ),
    Fault(
        D,
        "noise-is-token-0",
        "draft-noise-token",
        "Noise is token 0.",
        Edit(EMBEDDING, "config.dspark_block_size), config.dspark_noise_token_id", "config.dspark_block_size), 0"),
    ),
    Fault(
        D,
        "drafts-causal",
        "draft-causal",
        "A draft sees only those before it.",
        Edit(
            INDICES,
            "return torch.cat((listed, own), dim=1).unsqueeze(1).expand(-1, drafts, -1).to(torch.int32)",
            "whole = torch.cat((listed, own), dim=1).unsqueeze(1).repeat(1, drafts, 1)\n"
            "    later = torch.arange(window + drafts) > window + torch.arange(drafts).unsqueeze(1)\n"
            "    return whole.masked_fill(later, -1).to(torch.int32)",
        ),
    ),
    Fault(
        D,
        "drafts-see-themselves-only",
        "draft-rows-unseen",
        "A draft sees the ring and itself.",
        Edit(
            INDICES,
            "return torch.cat((listed, own), dim=1).unsqueeze(1).expand(-1, drafts, -1).to(torch.int32)",
            "whole = torch.cat((listed, own), dim=1).unsqueeze(1).repeat(1, drafts, 1)\n"
            "    other = torch.arange(window + drafts) != window + torch.arange(drafts).unsqueeze(1)\n"
            "    return whole.masked_fill(other & (torch.arange(window + drafts) >= window), -1).to(torch.int32)",
        ),
    ),
    Fault(
        D,
        "drafts-see-ring-only",
        "draft-rows-unseen",
        "Drafts do not see one another.",
        Edit(INDICES, "torch.cat((listed, own), dim=1)", "torch.cat((listed, torch.full_like(own, -1)), dim=1)"),
    ),
    Fault(
        D,
        "ring-unseen",
        "draft-ring-unseen",
        "Drafts see one another only.",
        Edit(INDICES, "slots < start_pos.unsqueeze(1)", "slots < 0 * start_pos.unsqueeze(1)"),
    ),
    Fault(
        D,
        "newest-slot-unseen",
        "draft-ring-range",
        "The slot of the model's newest position is not listed while the ring fills.",
        Edit(INDICES, "slots < start_pos.unsqueeze(1)", "slots < start_pos.unsqueeze(1) - 1"),
    ),
    Fault(
        D,
        "unwritten-slots-seen",
        "draft-ring-range",
        "All slots are listed from the beginning.",
        Edit(INDICES, "slots < start_pos.unsqueeze(1)", "slots < window + 0 * start_pos.unsqueeze(1)"),
    ),
    Fault(
        D,
        "oldest-positions-leave",
        "draft-ring-range",
        "Drafts count into the window: as many of the ring's oldest positions are not listed.",
        Edit(
            INDICES,
            "slots < start_pos.unsqueeze(1), slots, -1",
            "(slots < start_pos.unsqueeze(1)) & ((slots - start_pos.unsqueeze(1)) % window >= drafts), slots, -1",
        ),
    ),
    Fault(
        D,
        "drafts-one-late",
        "draft-position-off",
        "Drafts are rotated one position further.",
        Edit(ATTENTION, POSITIONS, f"{POSITIONS} + 1"),
    ),
    Fault(
        D,
        "drafts-one-early",
        "draft-position-off",
        "The first draft stands at the model's own position.",
        Edit(ATTENTION, POSITIONS, f"{POSITIONS} - 1"),
    ),
    Fault(
        D,
        "drafts-at-one-position",
        "draft-position-off",
        "All drafts are rotated as the first.",
        Edit(ATTENTION, POSITIONS, "start_pos.unsqueeze(1) + 0 * torch.arange(x.shape[1])"),
    ),
    Fault(
        D,
        "drafts-from-call-start",
        "draft-position-off",
        "Drafts begin where the model's call began.",
        Edit(BLOCK, "start_pos + main_x.shape[1]", "start_pos"),
    ),
    Fault(
        D,
        "ring-not-seeded",
        "draft-ring-not-seeded",
        "A prompt leaves nothing in the rings.",
        Edit(SEED, "rows = window_rows(", "rows = (start_pos > 0)[:, None, None] * window_rows("),
    ),
    Fault(
        D,
        "ring-seeded-with-last",
        "draft-ring-not-seeded",
        "A prompt leaves only its last position in the rings.",
        Edit(
            SEED,
            "rows = window_rows(",
            "rows = (torch.arange(main_x.shape[1]) == main_x.shape[1] - 1)[:, None] * window_rows(",
        ),
    ),
    Fault(
        D,
        "ring-rows-one-late",
        "draft-main-position",
        "Rows of the rings are rotated at the draft's position.",
        Edit(SEED, "torch.arange(main_x.shape[1])", "torch.arange(1, main_x.shape[1] + 1)"),
    ),
    Fault(
        D,
        "drafts-kept-in-ring",
        "draft-ring-keeps-drafts",
        "The rows of drafts are written to the ring.",
        Edit(
            "dspark.DraftAttention.step",
            "return draft_attention_taps(",
            "positions = start_pos.unsqueeze(1) + torch.arange(x.shape[1])\n"
            "    rows = window_rows(self.config, self.layer_id, self.weights, x, positions, compute=self.compute)\n"
            "    ring, self.window = self.window, window_update(self.config, self.window, rows, start_pos)\n"
            "    return draft_attention_taps(",
        ),
    ),
    Fault(
        D,
        "experts-of-the-model",
        "draft-experts",
        "As many experts are active as in the model's layers.",
        Edit("config.Config.of_drafts", "n_activated_experts=self.dspark_n_activated_experts,", ""),
    ),
    Fault(
        D,
        "experts-half",
        "draft-experts",
        "Half of the draft block's experts are never chosen.",
        Edit(
            BLOCK,
            "self.attention.seed(main_x, start_pos)",
            "self.attention.seed(main_x, start_pos)\n    self.block.weights = {**self.block.weights, "
            "'ffn.gate.bias': self.block.weights['ffn.gate.bias'] - 100.0 * (torch.arange("
            "self.block.weights['ffn.gate.bias'].shape[0]) >= self.block.weights['ffn.gate.bias'].shape[0] // 2)}",
        ),
    ),
)
