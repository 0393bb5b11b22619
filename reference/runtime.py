"""The slots through which layers share rows and selections (numerics.md 6.1 and 6.4)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch.nn import functional

from reference.config import Config
from reference.indexer import Ties

Reading = Literal["intended", "literal"]
"""Which index keys a layer scores against while its own group is incomplete (numerics.md 6.4, stale-index-keys)."""


def grow(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Append zero rows up to `length`: [B,C,d] -> [B,max(C,length),d]."""
    return functional.pad(rows, (0, 0, 0, max(0, length - rows.shape[1])))


class Runtime:
    """Shared slots of one batch of requests; each is overwritten by its source and read by the layers after it.

    - `compressed` bf16 [B,C,d]: compressed rows of the last KV source.
    - `index_keys` bf16 [B,C,index_head_dim]: index keys to score against.
    - `selected` int32 [B,T,k]: compressed positions that the last index source selected, -1 for none.
    - `candidates` bool [B,T,C]: candidate blocks of the candidate source.

    C is the largest number of rows of any request in the batch; rows beyond a request's own are zero and not visible.
    """

    def __init__(
        self, config: Config, batch_size: int, reading: Reading = "intended", *, ties: Ties = "library"
    ) -> None:
        if reading not in get_args(Reading):
            raise ValueError(f"reading must be 'intended' or 'literal', not {reading!r}")
        if ties not in get_args(Ties):
            raise ValueError(f"ties must be 'library' or 'earliest', not {ties!r}")
        self.reading: Reading = reading
        self.ties: Ties = ties
        self.compressed = torch.zeros(batch_size, 0, config.head_dim, dtype=torch.bfloat16)
        self.index_keys = torch.zeros(batch_size, 0, config.index_head_dim, dtype=torch.bfloat16)
        self.selected = torch.zeros(batch_size, 0, 0, dtype=torch.int32)
        self.candidates = torch.zeros(batch_size, 0, 0, dtype=torch.bool)

    def publish_index_keys(self, keys: torch.Tensor, group_completed: torch.Tensor) -> None:
        """Overwrite the slot with a source's keys: bf16 [B,C,index_head_dim], bool [B] (numerics.md 6.4).

        Intended: every call.  Literal: only for requests of which a group was completed in this call; the others keep
        what was published last, by whichever layer.
        """
        if self.reading == "literal":
            length = max(keys.shape[1], self.index_keys.shape[1])
            keys = torch.where(group_completed[:, None, None], grow(keys, length), grow(self.index_keys, length))
        self.index_keys = keys
