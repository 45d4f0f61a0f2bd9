"""Transformer model: a language model as a table of sizes, from which parameters and operations follow.

    Transformer(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, sequence=8192, gated=True)

    layer       attention  q, k, v, output             h·(q + 2·kv)·d + q·d·h parameters
                MLP        up, (gate,) down            2·h·f, or 3·h·f gated
                experts    router, `experts` MLPs of which each token visits `active_experts`, and a shared MLP
    embedding   V·h        head V·h (`tied`: none of its own)

Operations are those of matrix products and attention; a multiplication and an addition are two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy

_POSITIVE = ("layers", "hidden", "heads", "vocab", "sequence")
_WHOLE = ("kv_heads", "ffn", "head_size", "experts", "active_experts", "expert_ffn", "shared_ffn", "dense_layers")


@dataclass(frozen=True)
class Transformer:
    """A dense or mixture-of-experts transformer; sizes of 0 take the usual default of the others."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int = 2048
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0  # 0: 4 × hidden
    head_size: int = 0  # 0: hidden / heads
    gated: bool = False
    tied: bool = False
    positions: bool = False  # learned position embeddings
    causal: bool = True
    fused_attention: bool = True
    dropout: bool = False
    rotary: bool = False
    experts: int = 0
    active_experts: int = 1
    expert_ffn: int = 0  # 0: ffn
    shared_ffn: int = 0  # of a shared expert that all tokens visit
    dense_layers: int = 0  # layers at the start without experts
    name: str = "transformer"

    def __post_init__(self) -> None:
        faults = [
            Fault(f"{name} = {getattr(self, name)!r}", f"give a whole number, {least} or more")
            for names, least in ((_POSITIVE, 1), (_WHOLE, 0))
            for name in names
            if not _is_whole(getattr(self, name), least)
        ]
        if not faults:
            defaults = {
                "kv_heads": self.heads,
                "ffn": 4 * self.hidden,
                "head_size": max(1, self.hidden // self.heads),
                "expert_ffn": (self.ffn or 4 * self.hidden) if self.experts else 0,
            }
            for name, value in defaults.items():
                if not getattr(self, name):
                    object.__setattr__(self, name, value)
            faults = list(self._contradictions())
        if faults:
            raise ConfigError(faults, f"model {self.name}")

    def _contradictions(self) -> list[Fault]:
        faults = []
        if self.heads % self.kv_heads:
            faults.append(Fault(f"{self.heads} heads with {self.kv_heads} kv_heads", "give a divisor of heads"))
        if self.experts and not 1 <= self.active_experts <= self.experts:
            faults.append(Fault(f"active_experts = {self.active_experts} of {self.experts}", "give 1 to experts"))
        if self.dense_layers > self.layers:
            faults.append(Fault(f"dense_layers = {self.dense_layers} of {self.layers} layers", "give at most layers"))
        return faults

    # ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def query_size(self) -> int:
        """The width of all queries."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """The width of all keys."""
        return self.kv_heads * self.head_size

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of a layer."""
        return self.hidden * (2 * self.query_size + 2 * self.kv_size)

    def mlp_parameters(self, ffn: int) -> int:
        """Parameters of an MLP of that width."""
        return (3 if self.gated else 2) * self.hidden * ffn

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer."""
        return self.experts * self.mlp_parameters(self.expert_ffn) if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Parameters of a layer with experts outside of them: attention, router, shared expert, norms."""
        router = self.hidden * self.experts
        return self.attention_parameters + router + self.mlp_parameters(self.shared_ffn) + 2 * self.hidden

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer without experts."""
        return self.attention_parameters + self.mlp_parameters(self.ffn) + 2 * self.hidden

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings."""
        return (self.vocab + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        dense = (self.layers - self.sparse_layers) * self.dense_layer_parameters
        sparse = self.sparse_layers * (self.shared_parameters + self.expert_parameters)
        head = 0 if self.tied else self.vocab * self.hidden
        return dense + sparse + self.embedding_parameters + head + self.hidden

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses."""
        idle = self.experts - self.active_experts if self.experts else 0
        return self.parameters - self.sparse_layers * idle * self.mlp_parameters(self.expert_ffn)

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────
    def attention_flops(self, tokens: float, *, skips_mask: bool) -> float:
        """Forward operations of the attention of a layer; `skips_mask` counts the unmasked half of causal ones only."""
        return 4 * tokens * self.sequence * self.query_size * (0.5 if self.causal and skips_mask else 1)

    def model_flops(self, batch: float, *, skips_mask: bool = False) -> float:
        """Operations of a training step: forward and backward, without recomputation."""
        tokens = batch * self.sequence
        return 3 * sum(self.forward_flops(tokens, skips_mask=skips_mask))

    def forward_flops(self, tokens: float, *, skips_mask: bool = False) -> tuple[float, float]:
        """Forward operations of matrix products and of attention."""
        active = self.attention_parameters + (
            self.hidden * self.experts
            + self.mlp_parameters(self.shared_ffn)
            + self.active_experts * self.mlp_parameters(self.expert_ffn)
        )
        dense = self.attention_parameters + self.mlp_parameters(self.ffn)
        products = 2 * tokens * (self.sparse_layers * active + (self.layers - self.sparse_layers) * dense)
        head = 2 * tokens * self.hidden * self.vocab
        return products + head, self.layers * self.attention_flops(tokens, skips_mask=skips_mask)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that `read_transformer` reads back."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def model_presets() -> dict[str, dict[str, Any]]:
    """Return the models known by name, as plain data."""
    text = resources.files("gemini.tune").joinpath("models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def find_transformer(name: str, sequence: int | None = None) -> Transformer:
    """Return a model by the name of its preset."""
    known = model_presets()
    if name.lower() not in known:
        raise ConfigError([Fault(f"unknown model {name!r}", remedy(name.lower(), sorted(known)))], "model")
    model = Transformer(name=name.lower(), **known[name.lower()])
    return model if sequence is None else replace(model, sequence=sequence)


def read_transformer(data: Any, source: str = "model") -> Transformer:
    """Build a model from the name of a preset or from plain data; `preset` overrides parts of one."""
    if isinstance(data, str):
        return find_transformer(data)
    if not isinstance(data, Mapping):
        fault = Fault(f"a model is a name or an object, not {data!r}", 'write {"layers": 32, "hidden": 4096, …}')
        raise ConfigError([fault], source)
    if "preset" in data:
        base = find_transformer(str(data["preset"]))
        return read_transformer({**base.to_dict(), **{k: v for k, v in data.items() if k != "preset"}}, source)
    names = [entry.name for entry in fields(Transformer)]
    needed = ("layers", "hidden", "heads", "vocab")
    faults = [Fault(f"unknown key {key!r} of a model", remedy(str(key), names)) for key in data if key not in names]
    faults += [Fault(f"a model without {name}", f"give {name}") for name in needed if name not in data]
    if faults:
        raise ConfigError(faults, source)
    return Transformer(**data)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and math.isfinite(value) and value >= least
