"""`upstream:DIR`: a checkout of the published inference code as a target, on the suite's kernels.

The code is imported and watched as `conformance record` does it, with the same declarations of what its parts are
called (`conformance/recording/upstream.py`), and runs only after the user has agreed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conformance.adapters.in_process import to_torch
from conformance.adapters.target import UPSTREAM_PREFIX
from conformance.errors import ConformanceError, TargetError
from conformance.interface import Array, Config, Description, Implementation, Reading, Stateful, Unsupported, Weights
from conformance.ports.upstream_parts import Made, Part, Stack, WholeModel
from conformance.recording import upstream
from conformance.recording.call import Call
from conformance.recording.checkout import Checkout
from conformance.recording.taps import submodule


def agreed_checkout(target: str, agreed: bool) -> Checkout:
    """The checkout that a target names, after showing what will be executed.

    Raises:
        TargetError: no such checkout, or the user has not agreed; nothing is executed then.
    """
    try:
        checkout = Checkout.read(Path(target.removeprefix(UPSTREAM_PREFIX)))
    except ConformanceError as error:
        raise TargetError(f"target {target!r}: {error}") from error
    for line in checkout.notice(own_kernels=True):
        print(line, file=sys.stderr)
    if not agreed:
        raise TargetError(f"target {target!r}: nothing was executed: read the code, then say --yes")
    return checkout


class Upstream(Implementation):
    """The parts of a checkout that take a configuration, and the whole model.

    What the interface asks for without a configuration (norms, linears, the mixes by themselves) is not here: the code
    makes its modules from a configuration only. They are judged as taps of the parts that use them.
    """

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout
        self._made: Made | None = None

    def describe(self) -> Description:
        """What is executed; the reading is that of the code as it is."""
        files = self._checkout.executed(own_kernels=True)
        return Description(
            name=upstream.REPOSITORY,
            version=next(file.sha256[:12] for file in files if file.name == f"{upstream.ENTRY}.py"),
            reading="literal",
            conventions={
                **{file.name: f"sha256 {file.sha256}, {file.standing()}" for file in files},
                "kernels": "the suite's reference on the CPU in place of kernel.py",
                "reading": "with --reading intended, sources put their own index keys in the shared slot",
            },
        )

    def _stateless(self, config: Config, batch_size: int = 1) -> Made:
        """A model for parts without state, kept while the configuration stays the same."""
        kept = self._made
        if kept is None or kept.batch < batch_size or any(kept.mapping.get(k) != v for k, v in config.items()):
            kept = self._made = Made(self._checkout, config, batch_size, "literal")
        return kept

    def _filled(self, config: Config, part: str, weights: Weights, layer: int = 0) -> Made:
        made = self._stateless(config)
        made.fill_part(upstream.PARTS[part].module.format(l=layer), weights)
        return made

    # Parts with state -----------------------------------------------------------------------------------------------

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """A model of its own: the shared slots are globals of the code."""
        return Made(self._checkout, config, batch_size, reading)

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """A compressor with its carry; of the attention's weights it takes its own."""
        prefix = "compressor."
        own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        return Part("compressor", Made(self._checkout, config, batch_size, "literal"), layer_id, own)

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """The attention of one layer."""
        return Part("attention", runtime, layer_id, weights)

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One layer; its taps show the coefficients and the read of both sublayers."""
        return Part("block", runtime, layer_id, weights, token_map)

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Consecutive layers."""
        return Stack(runtime, layer_ids, weights, token_map)

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The model with these weights."""
        return WholeModel(runtime, weights, token_map)

    # Parts without state --------------------------------------------------------------------------------------------

    def query_latent(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Projection, then norm."""
        made = self._filled(config, "attention", weights, layer_id)
        return made.call("query norm", layer_id, x=made.call("query projection", layer_id, x=x.clone()))

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """Routing weights and experts."""
        weights_and_indices = self._filled(config, "gate", weights).call("gate", 0, x=x.clone(), image_mask=image_mask)
        return tuple(weights_and_indices)

    def expert(self, config: Config, weights: Weights, x: Array, routing_weight: Array | None) -> Array:
        """A routed expert where the weights are packed FP4, the shared one otherwise."""
        if weights["w1.weight"].dtype != torch.uint8:
            if routing_weight is not None:
                raise Unsupported("upstream: the shared expert takes no routing weight")
            return self._filled(config, "shared expert", weights).call("shared expert", 0, x=x.clone())
        weight = None if routing_weight is None else routing_weight.unsqueeze(-1)
        return self._filled(config, "routed expert", weights).call(
            "routed expert", 0, x=x.clone(), routing_weight=weight
        )

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """The mixture, with the given choice in the place of its gate's."""
        made = self._stateless(config)
        made.fill_part(upstream.PARTS["moe"].module.format(l=0), weights, left_out=("gate",))
        with made.replacing("gate", 0, (routing_weights.clone(), expert_indices.long())):
            return made.call("moe", 0, x=x.clone().unsqueeze(0), image_mask=None).squeeze(0)

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """Gate and experts together."""
        mask = None if image_mask is None else image_mask.unsqueeze(0)
        return self._filled(config, "moe", weights).call("moe", 0, x=x.clone().unsqueeze(0), image_mask=mask).squeeze(0)

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """As the attention's in a block whose other parameters are zeros."""
        made = self._stateless(config, len(h))
        layer = next(layer for layer in range(made.config.n_layers) if layer not in made.config.engram_layer_ids)
        path = upstream.PARTS["block"].module.format(l=layer)
        made.clear_part(path)
        block = submodule(made.model, path)
        for name, value in (("fn", fn), ("scale", scale), ("base", base)):
            getattr(block, f"hc_attn_{name}").data.copy_(value)
        ids = torch.zeros(h.shape[:2], dtype=torch.int64)
        pre = torch.zeros(h.shape[:3])
        with made.watched(Call(h.shape[0], h.shape[1], 0), path) as observer:
            made.call("block", layer, h=h.clone(), pre=pre, input_ids=ids, start_pos=0, image_mask=None)
        taps = observer.finish()
        pre, post, comb = (to_torch(taps[f"layer{layer}/attn_{name}"]) for name in ("pre", "post", "comb"))
        return pre, post, comb

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """What the tables of an Engram are asked for, whatever its residual."""
        made = self._stateless(config, len(input_ids))
        made.clear_part(upstream.PARTS["engram"].module.format(l=layer_id))
        made.fill_token_maps(token_map, [layer_id])
        h = torch.zeros(*input_ids.shape, made.config.hc_mult, made.config.dim, dtype=torch.bfloat16)
        seen: list[torch.Tensor] = []
        with made.given("engram tables", layer_id, lambda given: seen.append(given[0].clone())):
            made.call("engram", layer_id, h=h, input_ids=input_ids.long(), start_pos=0, image_mask=image_mask)
        return seen[0]

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """An Engram whose tables are asked for the given rows."""
        made = self._stateless(config, len(h))
        made.fill_part(upstream.PARTS["engram"].module.format(l=layer_id), weights)
        ids = torch.zeros(h.shape[:2], dtype=torch.int64)
        with made.given("engram tables", layer_id, lambda given: (rows.clone(), *given[1:])):
            return made.call("engram", layer_id, h=h.clone(), input_ids=ids, start_pos=0, image_mask=image_mask)
