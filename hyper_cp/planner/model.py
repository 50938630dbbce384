"""The sizes of a transformer on which the cost of a step depends, read from whatever describes the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedule.choices import heads_after_sharing
from .cluster import check_count, read_object

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("heads", "num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "width": ("width", "hidden_size", "n_embd", "d_model"),
    "ffn": ("ffn", "intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocabulary", "vocab_size"),
    "head_dim": ("head_dim",),
    "experts": ("experts", "num_experts", "num_local_experts", "n_routed_experts"),
    "active_experts": ("active_experts", "num_experts_per_tok"),
    "expert_ffn": ("expert_ffn", "moe_intermediate_size"),
    "latent": ("latent",),
}
"""For each size, the names under which configurations have it; the first that is there counts."""

NORMS = ("fused", "plain", "transformers")
OPTIONAL = ("kv_heads", "head_dim", "ffn", "experts", "active_experts", "expert_ffn", "latent")
LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""The names under which configurations have the sizes of latent attention."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Llama's kind: RMSNorm, attention with a head dim of its own, a gated MLP, a vocabulary's head.

    Args:
        layers: number of decoder layers.
        heads, kv_heads: query heads, and key/value heads (0: as many as query heads).
        width: size of the residual stream (``hidden_size``).
        ffn: inner size of the MLP that one token runs through, of all its active experts together (0: four times the
            width).
        vocabulary: number of tokens of the head.
        head_dim: of queries, keys and values (0: width / heads); in latent attention the mean of a key's and a value's.
        latent: in latent attention, numbers of a token's latent and of its rotary part (0: there is none).
        stored_ffn: inner size of all experts together, which take memory and no time (0: the same as ``ffn``).
        tied: True if the head and the embedding are one parameter.
        norm: the RMSNorm, which decides how much it saves for backward: ``"fused"`` (one kernel: ``nn.RMSNorm`` on
            accelerators), ``"plain"`` (``nn.RMSNorm`` on the CPU), or ``"transformers"`` (Hugging Face's, in fp32).

    Raises:
        ValueError: for a size that is not a positive int, or heads that are not a multiple of the key/value heads.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    stored_ffn: int = 0
    tied: bool = False
    norm: str = "fused"
    latent: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocabulary"):
            check_count(name, getattr(self, name), "It is a size of the model")
        if self.norm not in NORMS:
            raise ValueError(
                f"norm={self.norm!r} is unknown. It decides how much is saved for backward. Choose one of "
                f"{', '.join(NORMS)}"
            )
        if not self.head_dim and self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not split over heads={self.heads}. Without head_dim, a head has width / "
                "heads channels. Pass head_dim"
            )
        derived = {
            "kv_heads": self.heads,
            "ffn": 4 * self.width,
            "head_dim": self.width // self.heads,
            "stored_ffn": self.ffn or 4 * self.width,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, getattr(self, name) or value)
            check_count(name, getattr(self, name), "It is a size of the model")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}. Each key/value head serves equally "
                "many query heads. Correct one of the two"
            )

    @property
    def query_width(self) -> int:
        """Channels of all query heads of a token, and of the output of attention."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of all key heads of a token; values have as many."""
        return self.kv_heads * self.head_dim

    def numbers_of_heads(self, ulysses: int = 1) -> int:
        """Numbers of a token's keys and values that one of ``ulysses`` ranks attends."""
        return 2 * heads_after_sharing(self.kv_heads, ulysses) // ulysses * self.head_dim

    def latents_travel(self, ulysses: int = 1) -> bool:
        """True if a token's latent is fewer numbers than the heads that one of ``ulysses`` ranks attends."""
        return 0 < self.latent < self.numbers_of_heads(ulysses)

    def numbers_that_travel(self, ulysses: int = 1) -> int:
        """Numbers of a token's keys and values that are sent to one of ``ulysses`` ranks, or of the latent."""
        return self.latent if self.latents_travel(ulysses) else self.numbers_of_heads(ulysses)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        return self.width * (2 * self.query_width + 2 * self.key_width + 3 * self.ffn)

    @property
    def stored_layer_weights(self) -> int:
        """Weights of one layer that take memory: those of idle experts included."""
        return self.layer_weights + 3 * self.width * (self.stored_ffn - self.ffn) + 2 * self.width

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        heads = self.head_weights * (1 if self.tied else 2)
        return self.layers * self.stored_layer_weights + heads + self.width


def model_shape(model: Any) -> ModelShape:
    """The shape of a model from a :class:`ModelShape`, a dict, or any object with the attributes of a Hugging Face
    configuration (``num_hidden_layers``, ``num_attention_heads``, ``hidden_size``, ``vocab_size`` ...; those of its
    ``text_config``, if there is one). transformers is not needed.

    Raises:
        TypeError: if a size is missing that cannot be derived.
    """
    if isinstance(model, ModelShape):
        return model
    config = getattr(model, "config", model)
    config = _get(config, "text_config") or config
    found: dict[str, Any] = {}
    for size, names in NAMES.items():
        value = next((x for name in names if (x := _get(config, name)) is not None), None)
        if value is None and size not in OPTIONAL:
            raise TypeError(
                f"the model, a {type(model).__name__}, has no {names[1] if len(names) > 1 else size}. The cost of a "
                f"step depends on it. Pass a ModelShape, or a dict or configuration with one of {', '.join(names)}"
            )
        if value is not None:
            found[size] = value
    experts, active = found.pop("experts", None), found.pop("active_experts", None)
    inner = found.pop("expert_ffn", None) or found.get("ffn")
    if experts and active and inner:
        shared = (_get(config, "n_shared_experts") or 0) * inner
        found["ffn"], found["stored_ffn"] = active * inner + shared, experts * inner + shared
    rank, rotary, plain, value = (_get(config, name) or 0 for name in LATENTS)
    if rank and plain:
        found |= {"latent": rank + rotary, "head_dim": (plain + rotary + value) // 2, "kv_heads": found["heads"]}
    found["tied"] = bool(_get(config, "tie_word_embeddings") or _get(config, "tied"))
    found["norm"] = _get(config, "norm") or ("transformers" if _get(config, "model_type") else "fused")
    return ModelShape(**found)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def configuration(model: Any) -> Any:
    """The configuration under a path or a name; anything else as it is."""
    if not isinstance(model, (str, Path)):
        return model
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return read_object("model", path, "A configuration is", "a config.json")
    # A name has at most one slash, and no ending of a file: everything else would only be looked up in the network.
    if isinstance(model, Path) or path.suffix == ".json" or model[:1] in ("/", ".", "~") or len(path.parts) > 2:
        raise ValueError(
            f"model={str(model)!r} means the file {str(path)!r}, which does not exist. It holds the sizes of the "
            "model. Pass the path of a config.json or of its folder, or a name that transformers.AutoConfig finds"
        )
    try:
        from transformers import AutoConfig  # optional: a name needs it, a path does not

        return AutoConfig.from_pretrained(str(model))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"model={str(model)!r} is no file, and no configuration of this name was found: {error}. Names are looked "
            "up by transformers. Pass the path of a config.json, or a dict of sizes"
        ) from error
