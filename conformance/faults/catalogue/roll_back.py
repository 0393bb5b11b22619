"""What rejected drafts leave behind, and verifications in which tokens see later ones (numerics.md 10.1)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

D = "dspark"
ATTENTION = "attention.Attention.roll_back"
RING = "window.rolled_back_ring"

FAULTS: tuple[Fault, ...] = (
    Fault(
        D,
        "ring-not-rolled-back",
        "draft-left-in-ring",
        "The ring keeps rows of rejected drafts.",
        Edit(ATTENTION, "self.window = rolled_back_ring(self.config, self._last_call, end)", "pass"),
    ),
    Fault(
        D,
        "ring-slots-emptied",
        "draft-left-in-ring",
        "Slots of rejected drafts are emptied; the rows that stood there are lost.",
        Edit(
            RING,
            "call.rows[one, :length], start)",
            "torch.cat((call.rows[one, :length], 0 * call.rows[one, length:]), dim=1), start)",
        ),
    ),
    Fault(
        D,
        "ring-one-token-too-many",
        "draft-left-in-ring",
        "One rejected token is kept.",
        Edit(RING, "call.rows[one, :length]", "call.rows[one, : length + 1]"),
    ),
    Fault(
        D,
        "ring-by-first-request",
        "draft-left-in-ring",
        "All requests of a batch go back as far as the first.",
        Edit(RING, "call.rows[one, :length]", "call.rows[one, : lengths[0]]"),
    ),
    Fault(
        D,
        "rows-not-rolled-back",
        "draft-left-in-rows",
        "Compressed rows that a rejected draft completed stay.",
        Edit(
            ATTENTION,
            "self.compressed = self.compressed[:, : exists.shape[1]] * exists",
            "pass",
        ),
    ),
    Fault(
        D,
        "rows-appended-after",
        "draft-left-in-rows",
        "Compressed rows are cut one short: the last complete group is lost.",
        Edit(
            ATTENTION,
            "self.compressed = self.compressed[:, : exists.shape[1]] * exists",
            "self.compressed = self.compressed[:, : exists.shape[1]] * exists\n        self.compressed[:, -1:] = 0",
        ),
    ),
    Fault(
        D,
        "index-keys-not-rolled-back",
        "draft-left-in-index-keys",
        "Index keys that a rejected draft completed stay.",
        Edit(
            ATTENTION,
            "self.index_keys = self.index_keys[:, : exists.shape[1]] * exists",
            "pass",
        ),
    ),
    Fault(
        D,
        "index-keys-cut-short",
        "draft-left-in-index-keys",
        "Index keys are cut one short: the last complete group's is lost.",
        Edit(
            ATTENTION,
            "self.index_keys = self.index_keys[:, : exists.shape[1]] * exists",
            "self.index_keys = self.index_keys[:, : exists.shape[1]] * exists\n        self.index_keys[:, -1:] = 0",
        ),
    ),
    Fault(
        D,
        "carry-not-rolled-back",
        "draft-left-in-carry",
        "The unfinished group holds a rejected token.",
        Edit(
            "compressor.Compressor.roll_back",
            "self.carry_kv, self.carry_score = self._keep(end - self._last_call[0])",
            "pass",
        ),
    ),
    Fault(
        D,
        "carry-emptied",
        "draft-left-in-carry",
        "The unfinished group is emptied, the kept token with it.",
        Edit("compressor.Compressor.roll_back", "self._keep(end - self._last_call[0])", "self._keep(0 * end)"),
    ),
    Fault(
        D,
        "look-back-not-rolled-back",
        "draft-left-in-look-back",
        "N-grams look back to rejected tokens.",
        Edit("block.Block.roll_back", "self.look_back.roll_back(end)", "pass"),
    ),
    Fault(
        D,
        "look-back-one-short",
        "draft-left-in-look-back",
        "N-grams look back past the newest kept token.",
        Edit("engram.LookBack.roll_back", "(end - start_pos).unsqueeze(1)", "(end - start_pos - 1).unsqueeze(1)"),
    ),
    Fault(
        D,
        "draft-rings-not-rolled-back",
        "draft-left-in-draft-rings",
        "The draft head keeps rows of rejected positions.",
        Edit(
            "dspark.DraftAttention.roll_back",
            "self.window = rolled_back_ring(self.config, self._last_call, end)",
            "pass",
        ),
    ),
    Fault(
        D,
        "first-draft-ring-only",
        "draft-left-in-draft-rings",
        "Only the first draft block is taken back.",
        Edit("dspark.DSpark.roll_back", "self.blocks.values()", "list(self.blocks.values())[:1]"),
    ),
    Fault(
        D,
        "verification-sees-whole-call",
        "verification-not-causal",
        "Every token of a verification reads the ring as its last token leaves it.",
        Edit(
            "window.window_indices",
            "if length > 1:",
            "if length > 1:\n        newest = newest * 0 + start_pos + length - 1\n"
            "        listed = newest - window + 1 + torch.arange(window)\n        slots = listed % window",
        ),
    ),
    Fault(
        D,
        "verification-scored-at-its-end",
        "verification-not-causal",
        "Index scores of a verification are those that its last token sees.",
        Edit(
            "attention.Attention._select",
            "own = (queries[one], head_weights[one], keys[one, :count], positions[one], mask)",
            "seen = positions[one] * 0 + positions[one, -1:] if int(positions[request, 0]) else positions[one]\n"
            "        own = (queries[one], head_weights[one], keys[one, :count], seen, mask)",
        ),
    ),
)
