"""Mistakes in the attention layer, and in who reads what of whom (numerics.md 6 and 6.1)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

A = "attention"
LATENT = "attention.query_latent"
QUERIES = "attention.attention_queries"
OUTPUT = "attention.attention_output"
STEP = "attention.Attention.step"
COMPRESS = "attention.Attention._compress"
SELECT = "attention.Attention._select"
CONTEXT = "attention.Attention._context"
TURNED_BACK = "rotate(config, layer_id, o, positions, inverse=True, compute=compute)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        A,
        "latent-not-normed",
        "query-norm",
        "The query latent is not normed.",
        Edit(LATENT, 'rms_norm(latent, weights["q_norm.weight"], config.norm_eps, compute=compute)', "latent"),
    ),
    Fault(
        A,
        "heads-normed",
        "query-heads-normed",
        "Query heads are normed, as in an earlier model.",
        Edit(
            QUERIES,
            "return rotate(config, layer_id, q, ",
            "q = rms_norm(q, torch.ones(config.head_dim), config.norm_eps)\n    return rotate(config, layer_id, q, ",
        ),
    ),
    Fault(
        A,
        "queries-not-rotated",
        "query-rotation",
        "Query heads are not rotated.",
        Edit(QUERIES, "rotate(config, layer_id, q, positions, compute=compute)", "q"),
    ),
    Fault(
        A,
        "queries-heads-transposed",
        "heads-transposed",
        "Features and heads of the projection are exchanged.",
        Edit(
            QUERIES,
            "torch.unflatten(q, -1, (config.n_heads, config.head_dim))",
            "torch.unflatten(q, -1, (config.head_dim, config.n_heads)).mT.contiguous()",
        ),
    ),
    Fault(
        A,
        "output-not-turned-back",
        "inverse-rotation-missing",
        "The output keeps the query's rotation.",
        Edit(OUTPUT, TURNED_BACK, "o"),
    ),
    Fault(
        A,
        "output-turned-on",
        "inverse-rotation-forward",
        "The output is turned on instead of back.",
        Edit(OUTPUT, "inverse=True", "inverse=False"),
    ),
    Fault(
        A,
        "output-turned-back-by-layer-0",
        "one-rotary-base",
        "The output is turned back by the table of layer 0.",
        Edit(OUTPUT, "rotate(config, layer_id, o", "rotate(config, 0, o"),
    ),
    Fault(
        A,
        "output-turned-back-by-layer-2",
        "one-rotary-base",
        "One table turns all outputs back.",
        Edit(OUTPUT, "rotate(config, layer_id, o", "rotate(config, config.kv_source_layers[0], o"),
    ),
    Fault(
        A,
        "output-groups-interleaved",
        "wo-a-groups-mixed",
        "Groups take every eighth head instead of eight in a row.",
        Edit(
            OUTPUT,
            "o.flatten(-2), -1, (config.o_groups, -1)",
            "o.unflatten(2, (-1, config.o_groups)).transpose(2, 3).flatten(2), -1, (config.o_groups, -1)",
        ),
    ),
    Fault(
        A,
        "output-weights-interleaved",
        "wo-a-groups-mixed",
        "The groups' matrices are read as [rank, group].",
        Edit(
            OUTPUT,
            "torch.unflatten(wo_a, 0, (config.o_groups, config.o_lora_rank))",
            "torch.unflatten(wo_a, 0, (config.o_lora_rank, config.o_groups)).transpose(0, 1)",
        ),
    ),
    Fault(
        A,
        "output-input-quantised",
        "wo-a-input-quantised",
        "The input of wo_a is quantised like that of an FP8 layer.",
        Edit(
            OUTPUT,
            "grouped.to(compute)",
            "__import__('reference.quantize').quantize.fake_quantize_fp8(grouped).to(compute)",
        ),
    ),
    Fault(
        A,
        "output-low-not-rounded",
        "wo-a-not-rounded",
        "The groups' results are not rounded to bf16.",
        Edit(OUTPUT, "to_bf16(torch.einsum", "(torch.einsum"),
    ),
    Fault(
        A,
        "output-low-truncated",
        "bf16-truncated",
        "The groups' results are cut to bf16 instead of rounded.",
        Edit(OUTPUT, "to_bf16(torch.einsum", "arithmetic.truncate(torch.einsum"),
    ),
    Fault(
        A,
        "scale-of-rotary-part",
        "scale-wrong",
        "Scores are scaled by the width of the rotary part.",
        Edit(STEP, "config.head_dim**-0.5", "config.rope_head_dim**-0.5"),
    ),
    Fault(
        A,
        "ring-outlives-request",
        "ring-survives-request",
        "A new request reads the slots that the one before had filled.",
        Edit(
            CONTEXT,
            "window_list = window_indices(self.config, start, rows.shape[1])",
            "self.longest = max(getattr(self, 'longest', 0), start)\n"
            "        window_list = window_indices(self.config, self.longest if start else 0, rows.shape[1])",
        ),
    ),
    Fault(
        A,
        "position-of-first-request",
        "position-of-first-request",
        "All requests stand where the first one does.",
        Edit(STEP, "start_pos.unsqueeze(1)", "start_pos[:1].unsqueeze(1).expand(x.shape[0], 1)"),
    ),
    Fault(
        A,
        "list-without-shift",
        "selection-shift",
        "Selected positions are not moved behind the window's rows.",
        Edit(CONTEXT, "selected + context.shape[0]", "selected"),
    ),
    Fault(
        A,
        "list-shifted-by-window",
        "selection-shift",
        "A prompt's selection is moved by the size of the ring.",
        Edit(CONTEXT, "selected + context.shape[0]", "selected + self.config.window_size"),
    ),
    Fault(
        A,
        "padding-shifted",
        "minus-one-read-as-row",
        "Entries of -1 are moved like positions.",
        Edit(CONTEXT, "torch.where(selected >= 0, selected + context.shape[0], -1)", "(selected + context.shape[0])"),
    ),
    Fault(
        A,
        "selection-not-read",
        "selection-not-read",
        "Only the window is attended to.",
        Edit(CONTEXT, "torch.cat((window_list, shifted), dim=-1)", "window_list"),
    ),
    Fault(
        A,
        "window-not-read",
        "window-not-read",
        "Layers with compressed rows do not attend to the window.",
        Edit(CONTEXT, "torch.cat((window_list, shifted), dim=-1)", "shifted"),
    ),
    Fault(
        A,
        "window-positions-once",
        "same-rows-removed",
        "A position in the window is not also read compressed.",
        Edit(
            CONTEXT,
            "shifted = torch.where(selected >= 0,",
            "newest = start + torch.arange(rows.shape[1]).unsqueeze(1)\n"
            "            near = selected > newest - self.config.window_size\n"
            "            inside = near & (self.config.ratio(self.layer_id) == 1)\n"
            "            shifted = torch.where((selected >= 0) & ~inside,",
        ),
    ),
    Fault(
        A,
        "ring-of-first-request",
        "requests-mixed",
        "All requests read the first one's ring.",
        Edit(CONTEXT, "self.window[request]", "self.window[0]"),
    ),
    Fault(
        A,
        "rows-of-first-request",
        "requests-mixed",
        "All requests read the first one's compressed rows.",
        Edit(CONTEXT, "self.runtime.compressed[request]", "self.runtime.compressed[0]"),
    ),
    Fault(
        A,
        "selection-of-first-request",
        "selection-of-first-request",
        "All requests read the first one's selection.",
        Edit(CONTEXT, "self.runtime.selected[request]", "self.runtime.selected[0]"),
    ),
    Fault(
        A,
        "selection-of-kv-source",
        "selection-of-earlier-source",
        "Re-indexing layers do not publish what they select.",
        Edit(
            SELECT,
            "runtime.selected = cat_padded(selected, -1)",
            "chosen = cat_padded(selected, -1)\n    if config.compresses(layer_id):\n        runtime.selected = chosen",
        ),
    ),
    Fault(
        A,
        "rows-of-first-source",
        "compressed-rows-of-other-source",
        "Every layer reads the compressed rows of the first source.",
        Edit(
            COMPRESS,
            "self.runtime.compressed = self.compressed[:, :existing]",
            "if layer_id == config.kv_source_layers[0]:\n"
            "        self.runtime.compressed = self.compressed[:, :existing]",
        ),
    ),
    Fault(
        A,
        "rows-published-on-completion",
        "compressed-rows-of-other-source",
        "A call that completes no group publishes no rows.",
        Edit(
            COMPRESS,
            "self.runtime.compressed = self.compressed[:, :existing]",
            'if "latent" in taps:\n        self.runtime.compressed = self.compressed[:, :existing]',
        ),
    ),
    Fault(
        A,
        "stale-index-keys",
        "stale-index-keys",
        "Keys of whoever published last, though the intended reading is declared.",
        Edit("runtime.Runtime.publish_index_keys", 'self.reading == "literal"', 'self.reading == "intended"'),
    ),
    Fault(
        A,
        "own-index-keys",
        "fresh-index-keys",
        "Each source scores its own keys, though the literal reading is declared.",
        Edit("runtime.Runtime.publish_index_keys", 'self.reading == "literal"', "not self.reading"),
    ),
    Fault(
        A,
        "keys-of-this-call",
        "chunk-keys-lost",
        "Only the keys of this call are scored.",
        Edit(
            COMPRESS,
            "self.runtime.publish_index_keys(self.index_keys[:, :existing]",
            "old = torch.arange(existing) < first_row.min()\n"
            "    fresh = self.index_keys[:, :existing].masked_fill(old[None, :, None], 0.0)\n"
            "    self.runtime.publish_index_keys(fresh",
        ),
    ),
    Fault(
        A,
        "candidates-of-first-call",
        "candidates-of-earlier-call",
        "The mask of the first query serves all of them.",
        Edit(
            SELECT,
            "runtime.candidates = cat_padded(candidates, False)",
            "runtime.candidates = cat_padded(candidates, False)[:, :1].expand(-1, x.shape[1], -1)",
        ),
    ),
    Fault(
        A,
        "candidates-not-published",
        "candidates-of-earlier-call",
        "Every call uses the mask of the first one.",
        Edit(
            SELECT,
            "if candidates:\n",
            "if candidates and int(positions[0, 0]) > 0:\n"
            "        missing = max(existing) - runtime.candidates.shape[-1]\n"
            "        grown = functional.pad(runtime.candidates[:, -1:], (0, missing))\n"
            '        taps["candidates"] = runtime.candidates = grown\n'
            "    elif candidates:\n",
        ),
    ),
    Fault(
        A,
        "first-layer-of-group-unmasked",
        "candidates-not-applied",
        "Only the later re-indexing layers are restricted.",
        Edit(
            SELECT,
            "if config.uses_candidates(layer_id) else None",
            "if config.uses_candidates(layer_id) and layer_id != next("
            "l for l in config.index_source_layers if config.uses_candidates(l)) else None",
        ),
    ),
    Fault(
        A,
        "continued-call-without-window",
        "chunk-window-short",
        "A longer call sees nothing of the calls before it.",
        Edit(
            "window.window_indices",
            "torch.where(listed < start_pos, slots, window + listed - start_pos)",
            "torch.where(listed < start_pos, -1, window + listed - start_pos)",
        ),
    ),
    Fault(
        A,
        "row-0-before-any",
        "empty-row-attended",
        "A row is attended to before there is any.",
        Edit(
            SELECT,
            "runtime.selected = torch.zeros(*positions.shape, 0, dtype=torch.int32)",
            "runtime.compressed = torch.zeros(len(x), 1, config.head_dim, dtype=x.dtype)\n"
            "        runtime.selected = torch.zeros(*positions.shape, 1, dtype=torch.int32)",
        ),
    ),
    Fault(
        A,
        "selection-of-earlier-call",
        "selection-of-earlier-call",
        "A step reads what the call before it selected.",
        Edit(
            SELECT,
            'taps["selected"] = runtime.selected = cat_padded(selected, -1)',
            'taps["selected"] = cat_padded(selected, -1)\n'
            "    before = getattr(self, 'selected_before', taps['selected'])\n"
            "    self.selected_before = taps['selected'][:, -1:]\n"
            "    runtime.selected = before if x.shape[1] == 1 else taps['selected']",
        ),
    ),
    Fault(
        A,
        "one-runtime-a-process",
        "global-runtime",
        "All requests of a process share one set of slots.",
        Edit(
            "runtime.Runtime.__init__",
            "self.reading: Reading = reading",
            "self.__dict__ = arithmetic.GLOBAL\n    self.reading = reading",
        ),
    ),
)
