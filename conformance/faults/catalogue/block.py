"""Mistakes in blocks and stacks (numerics.md 5 and 6.1)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

B = "block"
STEP = "block.Block.step"

FAULTS: tuple[Fault, ...] = (
    Fault(
        B,
        "attention-reads-own-mix",
        "mix-not-late",
        "The attention reads with its own mix.",
        Edit(STEP, 'self._read(h, pre, "attn_norm")', 'self._read(h, attn_pre, "attn_norm")'),
    ),
    Fault(
        B,
        "mixture-reads-own-mix",
        "mix-not-late",
        "The mixture reads with its own mix.",
        Edit(STEP, 'self._read(h, attn_pre, "ffn_norm")', 'self._read(h, ffn_pre, "ffn_norm")'),
    ),
    Fault(
        B,
        "mixture-reads-incoming-mix",
        "mix-two-late",
        "The mixture reads with the mix that the attention read with.",
        Edit(STEP, 'self._read(h, attn_pre, "ffn_norm")', 'self._read(h, pre, "ffn_norm")'),
    ),
    Fault(
        B,
        "attention-mix-handed-on",
        "attention-mix-handed-on",
        "The attention's mix is handed to the next layer.",
        Edit(STEP, '"pre_out": ffn_pre', '"pre_out": attn_pre'),
    ),
    Fault(
        B,
        "mixture-writes-attention-mix",
        "coefficients-not-renewed",
        "The mixture writes with the attention's coefficients.",
        Edit(
            STEP,
            'hyper_connection_write(taps["ffn_out"], h, post, comb',
            'hyper_connection_write(taps["ffn_out"], h, taps["attn_post"], taps["attn_comb"]',
        ),
    ),
    Fault(
        B,
        "coefficients-before-attention",
        "coefficients-not-renewed",
        "The mixture's coefficients come from the block's input.",
        Edit(STEP, 'self._coefficients(h, "ffn")', 'self._coefficients(taps["h_in"], "ffn")'),
    ),
    Fault(
        B,
        "mixture-reads-block-input",
        "residual-order",
        "Attention and mixture run side by side.",
        Edit(STEP, 'self._read(h, attn_pre, "ffn_norm")', 'self._read(taps["h_in"], attn_pre, "ffn_norm")'),
    ),
    Fault(
        B,
        "norms-swapped",
        "block-norms-swapped",
        "The two norms of the block are exchanged.",
        Edit(STEP, '"ffn_norm")', '"attn_norm")'),
    ),
    Fault(
        B,
        "coefficients-of-attention-weights",
        "block-weights-swapped",
        "The mixture uses the attention's stream weights.",
        Edit(STEP, 'self._coefficients(h, "ffn")', 'self._coefficients(h, "attn")'),
    ),
    Fault(
        B,
        "read-not-normed",
        "block-norm-missing",
        "Sublayers receive what was read without a norm.",
        Edit(
            "block.Block._read",
            'return rms_norm(x, self.weights[f"{norm}.weight"], self.config.norm_eps, compute=self.compute)',
            "return x",
        ),
    ),
    Fault(
        B,
        "engram-missing",
        "engram-rows-zero",
        "Layers with an Engram go without it.",
        Edit(STEP, 'h = taps["engram_out"]', "pass"),
    ),
    Fault(
        B,
        "engram-after-coefficients",
        "engram-after-coefficients",
        "The attention's coefficients are those of the residual before Engram.",
        Edit(STEP, 'self._coefficients(h, "attn")', 'self._coefficients(taps.get("engram_in", h), "attn")'),
    ),
    Fault(
        B,
        "engram-not-in-residual",
        "engram-after-coefficients",
        "The attention reads Engram's result, its write does not see it.",
        Edit(
            STEP,
            'hyper_connection_write(taps["attn_out"], h,',
            'hyper_connection_write(taps["attn_out"], taps.get("engram_in", h),',
        ),
    ),
    Fault(
        B,
        "image-mask-lost",
        "gate-image-bias",
        "The mixture never hears of image tokens.",
        Edit(STEP, 'self._moe(taps["ffn_in"], image_mask)', 'self._moe(taps["ffn_in"], None)'),
    ),
    Fault(
        B,
        "engram-image-mask-lost",
        "image-written",
        "Engram's write never hears of image tokens.",
        Edit("block.Block._write_engram", "weights, h, rows, image_mask", "weights, h, rows, None"),
    ),
    Fault(
        "stack",
        "mix-not-handed-on",
        "mix-ignored",
        "Every layer reads with the mix that the stack was given.",
        Edit("stack.Stack.step", 'h, pre = of_layer["h_out"], of_layer["pre_out"]', 'h = of_layer["h_out"]'),
    ),
    Fault(
        "stack",
        "layers-descending",
        "layer-order",
        "Layers run from the last to the first.",
        Edit("stack.Stack.step", "self.blocks.items()", "list(self.blocks.items())[::-1]"),
    ),
    Fault(
        "stack",
        "last-layer-skipped",
        "layer-left-out",
        "The last layer is left out.",
        Edit("stack.Stack.step", "self.blocks.items()", "list(self.blocks.items())[:-1] or self.blocks.items()"),
    ),
    Fault(
        "stack",
        "sources-lag-behind",
        "source-after-reuse",
        "Index sources run after the layer that reuses them.",
        Edit(
            "stack.Stack.step",
            "self.blocks.items()",
            "sorted(self.blocks.items(), key=lambda item: item[0] + 1.5 * item[1].config.selects(item[0]))",
        ),
    ),
    Fault(
        "stack",
        "image-mask-lost",
        "gate-image-bias",
        "Layers never hear of image tokens.",
        Edit("stack.Stack.step", "start_pos, image_mask)\n        ", "start_pos, None)\n        "),
    ),
    Fault(
        B,
        "mix-ignored",
        "mix-ignored",
        "Sublayers read the first stream.",
        Edit("block.Block._read", "hyper_connection_read(h, pre, compute=self.compute)", "h[..., 0, :]"),
    ),
)
