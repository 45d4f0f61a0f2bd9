"""Transformer costs: the time and memory of a layer from its matrix products, its attention and its memory traffic.

    time of a product      operations / rate  +  bytes / bandwidth         fill and drain of its tiles are not hidden
    time of the rest       bytes that elementwise kernels read and write / bandwidth, and a start per kernel

    bytes per token and layer (b = 2)      kept                                   moved in the forward
    norms, residuals       on all tensor ranks, or 1/T of them    2·(2h + 2h)     eager 20h, fused 16h
    attention, fused       1/T     q, k, v, output                2·(2q + 2kv)
    attention, not fused   1/T     and the scores                 + 5·a·s         11·a·s
    MLP                    1/T     4f, gated 6f (eager 8f)                        4f, gated 6f (eager 10f)

A compiler keeps the input of a norm or of an activation and recomputes its output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gemini.cluster.device_class import DeviceClass
from gemini.tune.layer_cost import LayerCost, spread_layers
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.transformer_model import Transformer

HALF = 2  # bytes of an activation
_SCORE_TRAFFIC, _SCORE_KEPT = 11, 5  # bytes per score: softmax and dropout; their outputs and the mask
_QUANTIZE_TRAFFIC = 5 / 3  # bytes per element of input and output, in each of three passes of a product with 8 bits
_TRITON = 0.62  # of the efficiency of FlashAttention 2
_COMPOSED_NORM = 26  # bytes per element that a norm of elementary kernels moves beyond a fused one
_LOSS_TRAFFIC, _FUSED_LOSS_TRAFFIC = 28, 10  # bytes per logit, forward and backward
_LOSS_KEPT, _SPLIT_LOSS_KEPT, _FUSED_LOSS_KEPT = (
    14,
    18,
    4,
)  # bytes per logit: half and single precision, probabilities and the gradient


@dataclass(frozen=True)
class Product:
    """A matrix product of `rows × inner` by `inner × columns`, `count` times."""

    rows: float
    inner: float
    columns: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Operations of all of them."""
        return 2 * self.rows * self.inner * self.columns * self.count

    def seconds(self, device: DeviceClass, precision: str) -> float:
        """Return the time of all of them."""
        wide = 1 if precision == "fp8" else HALF
        read = wide * (self.rows * self.inner + self.inner * self.columns)
        nbytes = read + HALF * self.rows * self.columns
        if precision == "fp8":
            nbytes += _QUANTIZE_TRAFFIC * self.rows * (self.inner + self.columns)
        return device.product_seconds(self.flops, precision) + device.traffic_seconds(nbytes * self.count)


@dataclass(frozen=True)
class _Split:
    """The part of a layer on one device, and what it does there."""

    model: Transformer
    config: ParallelConfig
    sparse: bool

    @property
    def tokens(self) -> float:
        return self.config.micro_batch * self.model.sequence / self.config.context

    @property
    def shared(self) -> float:
        """The share of norms and residuals on one tensor rank."""
        return 1 / self.config.tensor if self.config.is_sequence_parallel else 1.0

    def attention_products(self) -> list[Product]:
        model, tensor = self.model, self.config.tensor
        return [
            Product(self.tokens, model.hidden, (model.query_size + 2 * model.kv_size) / tensor),
            Product(self.tokens, model.query_size / tensor, model.hidden),
        ]

    def mlp_products(self) -> list[Product]:
        model, config = self.model, self.config
        if not self.sparse:
            return self._mlp(self.tokens, model.ffn / config.tensor)
        products = [Product(self.tokens, model.hidden, model.experts)]
        local = model.experts / config.expert
        visits = self.tokens * model.active_experts / local  # of each local expert, spread evenly
        products += self._mlp(visits, model.expert_ffn / config.tensor, local)
        if model.shared_ffn:
            products += self._mlp(self.tokens, model.shared_ffn / config.tensor)
        return products

    def _mlp(self, rows: float, width: float, count: float = 1.0) -> list[Product]:
        hidden = self.model.hidden
        up = 2 if self.model.gated else 1
        return [Product(rows, hidden, up * width, count), Product(rows, width, hidden, count)]

    @property
    def mlp_width(self) -> float:
        """The width of all MLPs that a token visits, on one device."""
        model = self.model
        width = model.active_experts * model.expert_ffn + model.shared_ffn if self.sparse else model.ffn
        return width / self.config.tensor

    @property
    def scores(self) -> float:
        """The attention scores of one device, where they are stored."""
        model = self.model
        if model.fused_attention:
            return 0.0
        return self.tokens * model.heads * model.sequence / self.config.tensor

    def norm_traffic(self) -> float:
        model, eager = self.model, self.config.kernels == "eager"
        width = (20 if eager else 16) + (2 * _COMPOSED_NORM if eager and model.rotary else 0)
        return self.tokens * model.hidden * self.shared * (width + (10 if model.dropout else 0))

    def inner_traffic(self) -> float:
        """Bytes that elementwise kernels inside attention and MLP move, without the scores."""
        model, eager = self.model, self.config.kernels == "eager"
        mlp = ((10 if eager else 6) if model.gated else 4) * self.mlp_width
        turned = (20 if eager else 4) if model.rotary else 0
        layout = 4 if eager else 0
        qkv = (model.query_size + 2 * model.kv_size) / self.config.tensor
        moved = turned * (model.query_size + model.kv_size) / self.config.tensor + layout * qkv
        if self.sparse:  # tokens are sorted by expert and back
            moved += 4 * HALF * model.active_experts * model.hidden
        return self.tokens * (mlp + moved)

    def kept(self) -> tuple[float, float]:
        """Bytes that a layer keeps without recomputation: without the scores, and of the scores."""
        model, tensor = self.model, self.config.tensor
        eager = self.config.kernels == "eager"
        compiled = self.config.kernels == "compiled"
        outside = (2 if compiled else 4) * HALF * model.hidden + (2 * model.hidden if model.dropout else 0)
        if eager and model.rotary:
            outside += 6 * model.hidden
        attention = HALF * (2 * model.query_size + 2 * model.kv_size) / tensor
        attention += 4 * model.heads / tensor if model.fused_attention else 0
        values = ((4 if eager else 3) if model.gated else 2) - compiled
        mlp = values * HALF * self.mlp_width
        if self.sparse:
            mlp += 2 * HALF * model.active_experts * model.hidden
        scores = _SCORE_KEPT if model.dropout else HALF
        return self.tokens * (outside * self.shared + attention + mlp), scores * self.scores

    def temporaries(self) -> float:
        """Bytes of a layer while its backward runs: gradients of the widest values, inputs gathered for products."""
        model, config = self.model, self.config
        gradients = 2 * HALF * (self.mlp_width + model.hidden)
        gathered = 2 * HALF * model.hidden * (1 - 1 / config.tensor) if config.is_sequence_parallel else 0.0
        return self.tokens * (gradients + gathered)

    def selected(self) -> float:
        """Bytes that `selective` keeps: the layer's input, half of the products, the output of attention."""
        model, tensor = self.model, self.config.tensor
        attention = HALF * (2 * model.query_size + model.kv_size) / tensor + 4 * model.heads / tensor
        return self.tokens * (2 * HALF * model.hidden * self.shared + attention + HALF * self.mlp_width)


@dataclass(frozen=True)
class TransformerCosts:
    """The `CostModel` of a transformer; `scale` corrects all computation times by readings of real steps."""

    model: Transformer
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.model.name

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.model.layers

    @property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return self.model.sequence

    @property
    def parameters(self) -> float:
        """The number of parameters."""
        return self.model.parameters

    def model_flops(self, batch: float) -> float:
        """Operations of a step, attention counted without the mask, as is usual for MFU."""
        return self.model.model_flops(batch)

    def faults(self, config: ParallelConfig) -> list[str]:
        """Return why this model cannot be split so."""
        model, found = self.model, []
        if model.heads % config.tensor:
            found.append(f"{model.heads} heads cannot be split over tensor {config.tensor}")
        if model.vocab < config.tensor:
            found.append(f"a vocabulary of {model.vocab} cannot be split over tensor {config.tensor}")
        if model.sequence % (config.context * (2 if model.causal and config.context > 1 else 1)):
            found.append(f"{model.sequence} tokens cannot be split over context {config.context}")
        if config.expert > 1 and not model.experts:
            found.append(f"expert {config.expert} for a model without experts")
        elif config.expert > 1 and model.experts % config.expert:
            found.append(f"{model.experts} experts cannot be split over expert {config.expert}")
        return found

    def layer_kinds(self, config: ParallelConfig, device: DeviceClass) -> tuple[tuple[LayerCost, int], ...]:
        """Return dense layers, then those with experts."""
        dense = self.model.layers - self.model.sparse_layers
        kinds = ((False, dense), (True, self.model.sparse_layers))
        return tuple((self._layer(config, device, sparse), count) for sparse, count in kinds if count)

    def _layer(self, config: ParallelConfig, device: DeviceClass, sparse: bool) -> LayerCost:
        cost = _layer_cost(self.model, _relevant(config), device, sparse)
        return cost if self.scale == 1.0 else cost.scaled(self.scale)

    block_seconds = 0.0

    def layer_counts(self, config: ParallelConfig, device: DeviceClass) -> tuple[int, ...]:
        """Return an even number of layers per stage."""
        del device
        return spread_layers(self.layers, config.stages)

    def controller_seconds(self, config: ParallelConfig) -> float | None:
        """Return None: every device updates its own weights."""
        del config
        return None

    def embedding(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return the embedding: it reads rows and writes them; its gradient touches them again."""
        model, split = self.model, _Split(self.model, config, False)
        moved = device.traffic_seconds(split.tokens * model.hidden * split.shared * 3 * HALF)
        return LayerCost(
            forward=moved * self.scale,
            weight_gradient=2 * moved * self.scale,
            parameters=model.embedding_parameters / config.tensor,
            activations=split.tokens * 8,
            boundary=split.tokens * model.hidden * HALF * split.shared,
        )

    def head(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return the last norm, the projection on the vocabulary and the loss."""
        model, split = self.model, _Split(self.model, config, False)
        product = Product(split.tokens, model.hidden, model.vocab / config.tensor)
        precision = "bf16" if config.precision == "fp8" else config.precision
        once = product.seconds(device, precision) * self.scale
        logits = split.tokens * model.vocab / config.tensor
        traffic = _FUSED_LOSS_TRAFFIC if config.fused_loss else _LOSS_TRAFFIC
        loss = device.traffic_seconds(traffic * logits) * self.scale
        kept = _FUSED_LOSS_KEPT if config.fused_loss else _SPLIT_LOSS_KEPT if config.tensor > 1 else _LOSS_KEPT
        gathered = 2 * HALF * split.tokens * model.hidden if config.is_sequence_parallel else 0.0
        return LayerCost(
            forward=once + loss * 0.5,
            input_gradient=once + loss * 0.5,
            weight_gradient=once,
            parameters=(0 if model.tied and config.stages == 1 else model.vocab * model.hidden) / config.tensor
            + model.hidden,
            activations=split.tokens * model.hidden * HALF * 2 * split.shared,
            workspace=logits * kept + gathered,
            flops=product.flops,
        )


def _relevant(config: ParallelConfig) -> ParallelConfig:
    """Return the configuration with everything that a layer's cost does not depend on removed, to cache it."""
    shards = config.expert * config.tensor * config.context
    return replace(
        config, devices=shards, batch=config.micro_batch * config.expert, pipeline=1, chunks=1, zero=0, schedule="auto",
        optimizer="adam", pure_bf16=False, overlap_data=True, tensor_overlap=0.0, recompute_layers=None,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _layer_cost(model: Transformer, config: ParallelConfig, device: DeviceClass, sparse: bool) -> LayerCost:
    split = _Split(model, config, sparse)
    products = split.attention_products() + split.mlp_products()
    precision = config.precision
    product_seconds = sum(product.seconds(device, precision) for product in products)
    fused = model.fused_attention
    flops = model.attention_flops(split.tokens, skips_mask=fused) / config.tensor
    if fused:
        moved = HALF * split.tokens * (2 * model.query_size + 2 * model.kv_size) / config.tensor
        efficiency = _attention_efficiency(device, config.attention)
        attention = device.attention_seconds(flops, precision, efficiency) + device.traffic_seconds(moved)
    else:
        attention = flops / (device.flops("bf16" if precision == "fp8" else precision) * device.matrix_efficiency)
        attention += device.traffic_seconds(_SCORE_TRAFFIC * split.scores)
    kernels = (40 if model.rotary else 20) if config.kernels == "eager" else 14
    rest = device.traffic_seconds(split.norm_traffic() + split.inner_traffic()) + kernels * device.kernel_us * 1e-6
    forward = product_seconds + attention + rest
    repeated, repeated_flops = _recomputed(split, device, attention, rest, forward)
    kept, scores = split.kept()
    held = {
        "none": kept + scores,
        "attention": kept,
        "selective": min(kept, split.selected()),
        "full": split.tokens * model.hidden * HALF * split.shared,
    }[config.recompute]
    product_flops = sum(product.flops for product in products)
    local = model.expert_parameters / (config.expert * config.tensor) if sparse else 0.0
    outside = model.shared_parameters if sparse else model.dense_layer_parameters
    return LayerCost(
        forward=forward,
        input_gradient=product_seconds + (2.5 if fused else 2.0) * attention + 2 * rest,
        weight_gradient=product_seconds,
        recompute=repeated,
        attention=attention,
        parameters=(outside - 2 * model.hidden) / config.tensor + 2 * model.hidden,
        expert_parameters=local,
        activations=held,
        dropped=max(0.0, kept + scores - held),
        workspace=max(0.0, kept + scores - held) + split.temporaries(),
        boundary=split.tokens * model.hidden * HALF * split.shared,
        tensor_bytes=split.tokens * model.hidden * HALF,
        tensor_reduces=2 if config.tensor > 1 else 0,
        context_bytes=2 * HALF * split.tokens * model.kv_size / config.tensor if config.context > 1 else 0.0,
        expert_bytes=HALF * split.tokens * model.active_experts * model.hidden * split.shared
        if sparse and config.expert > 1
        else 0.0,
        flops=product_flops + flops,
        recomputed_flops=repeated_flops,
    )


def _attention_efficiency(device: DeviceClass, kernel: str) -> float:
    if kernel == "tuned":
        return device.tuned_attention_efficiency
    return device.attention_efficiency * (_TRITON if kernel == "triton" else 1)


def _recomputed(
    split: _Split, device: DeviceClass, attention: float, rest: float, forward: float
) -> tuple[float, float]:
    """Return seconds and operations that are repeated before the backward of a layer."""
    model, config = split.model, split.config
    flops = model.attention_flops(split.tokens, skips_mask=model.fused_attention) / config.tensor
    products = split.attention_products() + split.mlp_products()
    if config.recompute == "none":
        return 0.0, 0.0
    if config.recompute == "attention":
        return attention, flops
    if config.recompute == "full":
        return forward, flops + sum(product.flops for product in products)
    half = [Product(split.tokens, model.hidden, model.kv_size / config.tensor), split.attention_products()[1]]
    half += [replace(product, columns=product.columns / 2) for product in split.mlp_products()[:-1]]
    return rest + sum(product.seconds(device, config.precision) for product in half), sum(p.flops for p in half)
