"""Blocks, stacks and the whole text model (numerics.md 5 and 9)."""

import numpy as np

import attention
import engram
import experts
import hyper_connections
import linear


class Part:
    """Parameters whose names begin with a prefix, by the rest of the name."""

    def __init__(self, weights, prefix):
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name):
        return self.weights[self.prefix + name]


class Block:
    """One layer: Engram where the configuration has it, attention, mixture of experts."""

    def __init__(self, config, layer_id, weights, runtime, token_map, batch_size):
        self.config, self.layer_id, self.weights, self.token_map = config, layer_id, weights, token_map
        self.attention = attention.Attention(config, layer_id, Part(weights, "attn."), runtime, batch_size)
        self.ids, self.image = np.zeros((batch_size, 0), np.int32), np.zeros((batch_size, 0), bool)

    def step(self, h, pre, input_ids, start_pos, image_mask=None):
        """The residual and the reading mix for the next layer."""
        if self.layer_id in self.config["engram_layer_ids"]:
            h = self.engram(h, input_ids, start_pos, image_mask)

        def attend(x):
            return self.attention.step(x, start_pos)["attn_out"]

        def mix(x):
            mask = None if image_mask is None else image_mask.reshape(-1)
            flat = x.reshape(-1, x.shape[-1])
            return experts.moe(self.config, Part(self.weights, "ffn."), flat, mask).reshape(x.shape)

        # A sublayer reads with the mix that the one before it made, and writes with its own coefficients.
        for name, sublayer in (("attn", attend), ("ffn", mix)):
            fn, scale, base = (self.weights[f"hc_{name}_{part}"] for part in ("fn", "scale", "base"))
            next_pre, post, comb = hyper_connections.hyper_connection_coefficients(self.config, h, fn, scale, base)
            x = hyper_connections.hyper_connection_read(h, pre)
            y = sublayer(linear.rms_norm(x, self.weights[f"{name}_norm.weight"], self.config["norm_eps"]))
            h = hyper_connections.hyper_connection_write(y, h, post, comb)
            pre = next_pre
        return {"h_out": h, "pre_out": pre}

    def engram(self, h, input_ids, start_pos, image_mask):
        """Look back over the tokens of earlier calls too, as far as the longest n-gram reaches."""
        if attention.start_of(start_pos, input_ids.shape[1]) == 0:
            self.ids, self.image = self.ids[:, :0], self.image[:, :0]
        mask = np.zeros(input_ids.shape, bool) if image_mask is None else image_mask
        kept = self.config["engram_max_ngram_size"] - 1
        ids = np.concatenate([self.ids, input_ids], axis=1)
        image = np.concatenate([self.image, mask], axis=1)
        self.ids, self.image = ids[:, -kept:], image[:, -kept:]
        rows = engram.engram_hash(self.config, self.layer_id, self.token_map, ids, image)[:, -input_ids.shape[1] :]
        weights = Part(self.weights, "engram.")
        return engram.engram_write(self.config, self.layer_id, weights, h, rows, image_mask)

    def state(self):
        """That of the attention."""
        return self.attention.state()


class Stack:
    """Consecutive layers."""

    def __init__(self, config, layer_ids, weights, runtime, token_map, batch_size):
        self.blocks = {
            layer: Block(config, layer, Part(weights, f"layers.{layer}."), runtime, token_map, batch_size)
            for layer in layer_ids
        }

    def step(self, h, pre, input_ids, start_pos, image_mask=None):
        """One call through all layers."""
        for block in self.blocks.values():
            results = block.step(h, pre, input_ids, start_pos, image_mask)
            h, pre = results["h_out"], results["pre_out"]
        return {"h_out": h, "pre_out": pre}

    def state(self):
        """By layer and name."""
        return {
            f"layer{layer}/{name}": value
            for layer, block in self.blocks.items()
            for name, value in block.state().items()
        }


def embed(weight, input_ids):
    """Rows of the embedding."""
    return weight[input_ids]


def head(config, weights, h, pre):
    """Collapse the streams with the last mix, norm, project in float32."""
    collapsed = hyper_connections.hyper_connection_read(h, pre)
    normed = linear.rms_norm(collapsed, weights["norm.weight"], config["norm_eps"])
    return normed, linear.linear_fp32(normed, weights["head.weight"])


def greedy(logits):
    """The largest logit."""
    return logits.argmax(axis=-1).astype(np.int32)


def parameter_counts(config):
    """Learned elements by unit, scales not counted; from the shapes alone (numerics.md 0)."""
    width, streams, head_dim, latent = (config[name] for name in ("dim", "hc_mult", "head_dim", "q_lora_rank"))
    coefficients = (2 + streams) * streams
    stream = coefficients * streams * width + coefficients + 3
    index_queries = config["index_n_heads"] * (config["index_head_dim"] * latent + width)
    index_keys = config["index_head_dim"] * (head_dim + 1)
    heads = config["n_heads"] * head_dim
    narrow = config["o_groups"] * config["o_lora_rank"]
    every_attention = (
        latent * (width + 1 + heads)  # wq_a, its norm, wq_b
        + head_dim * (width + 1)  # wkv, its norm
        + narrow * (heads // config["o_groups"] + width)  # wo_a, wo_b
        + config["n_heads"]  # sinks
    )
    expert = 3 * width * config["moe_inter_dim"]
    moe = config["n_routed_experts"] * (width + 2 + expert) + config["n_shared_experts"] * expert
    counts = {"stream": stream, "norm": width}
    for layer in range(config["n_layers"]):
        attention_parameters = every_attention
        if layer in config["index_source_layers"]:
            attention_parameters += index_queries
        if layer in config["kv_source_layers"]:
            # Values, with groups of several tokens also gates, and the norm.
            matrices = 2 if config["compress_ratios"][layer] > 1 else 1
            attention_parameters += matrices * head_dim * width + head_dim + index_keys
        counts[f"attention/{layer}"], counts[f"moe/{layer}"] = attention_parameters, moe
        counts[f"layer/{layer}"] = attention_parameters + moe + 2 * (stream + width)
    for layer, rows in zip(config["engram_layer_ids"], config["engram_num_embeddings"], strict=True):
        row = config["engram_head_dim"]
        columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
        projection = columns * row * (streams + 1) * width
        counts[f"layer/{layer}"] += rows * row + projection + 2 * streams * width
    return {name: np.int64(count) for name, count in counts.items()}


class Model:
    """Embedding, all layers, head."""

    def __init__(self, config, weights, runtime, token_map, batch_size):
        self.config, self.weights = config, weights
        self.stack = Stack(config, range(config["n_layers"]), weights, runtime, token_map, batch_size)

    def step(self, input_ids, start_pos, image_mask=None, image_features=None):
        """Logits and token of the last position."""
        x = embed(self.weights["embed.weight"], input_ids)
        if image_features is not None:
            x = np.where(image_mask[..., None], image_features, x)
        streams = self.config["hc_mult"]
        h = np.repeat(x[:, :, None], streams, axis=2)
        pre = np.broadcast_to(np.eye(1, streams, dtype=np.float32)[0], (*x.shape[:2], streams))
        results = self.stack.step(h, pre, input_ids, start_pos, image_mask)
        _, logits = head(self.config, self.weights, results["h_out"][:, -1:], results["pre_out"][:, -1:])
        return {"logits": logits[:, 0], "output_ids": greedy(logits[:, 0])}

    def state(self):
        """That of all layers."""
        return self.stack.state()
