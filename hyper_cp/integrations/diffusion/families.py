"""The types of transformers of diffusers: their lists of blocks, and how sequences meet in the attention of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

IMAGE, PROMPT = "hidden_states", "encoder_hidden_states"
"""The arguments of blocks that hold the tokens of the image (or of all), and those of the prompt."""
Kinds = tuple[str, ...]
"""One of them, or both in their order in a sequence."""


@dataclass(frozen=True)
class Family:
    """The blocks of a type of models, and their attention."""

    stages: tuple[str, ...]
    """The lists of blocks, or several with a space between them if the model gathers nothing between them. With ``.*``
    behind it each block of a list is a stage, because the model works on whole sequences between them."""
    shared: tuple[str, ...]
    """The modules in a block whose queries and keys are the split sequence."""
    prompts: tuple[str, ...] = ()
    """The modules in a block whose keys are a prompt, of which every rank has all."""
    order: tuple[str, ...] = ()
    """In joint attention, the order of the two in queries and keys."""
    returned: tuple[str, ...] = (IMAGE,)
    """The results of a block that returns several tensors."""
    refused: tuple[str, ...] = ()
    """Inputs that count tokens of the whole image beside those that blocks get."""
    image: str = IMAGE
    """The blocks' own name of the argument that holds the image."""
    prompt: str = PROMPT
    dim: int = 1
    """The dimension of tokens in both."""
    pairs: bool = False
    """True if blocks make a mask of pairs of tokens: the product of what a mask of tokens says of both."""
    picks: bool = False
    """True if attention leaves out the tokens of a prompt that its mask hides."""
    counted: tuple[tuple[str, str], ...] = ()
    """Arguments that count the first tokens of the image or of the prompt."""
    segments: bool = False
    """True if attention cuts the sequence into the ``segments`` that blocks get. It gets a mask of pairs instead."""
    last: str = ""
    """The argument that counts the last tokens of the image, if those before them (a history) are split by themselves,
    like a prompt."""
    streams: tuple[tuple[str, str, str], ...] = ()
    """Modules of attention whose queries and keys are one of the two each, of which ``prompt`` then is a second stream
    (audio): the name, and what queries and keys are."""

    prompt_alone: bool = False
    """True if modules of attention attend twice: tokens of the prompt to those before them, and those of the image to
    all."""

    def stream(self, module: str) -> tuple[Kinds, Kinds] | None:
        """The kinds of tokens of the queries and the keys of a module of attention in a block, if they never change."""
        return next((((queries,), (keys,)) for name, queries, keys in self.streams if name == module), None)

    @property
    def lists(self) -> list[str]:
        """The names of all lists of blocks."""
        return [name.removesuffix(".*") for stage in self.stages for name in stage.split()]

    def patterns(self, attention: tuple[str, ...]) -> list[str]:
        """Patterns of the names of modules of attention in the model."""
        return [f"{name}.*.{inner}" for name in self.lists for inner in attention]


_TEXT_FIRST, _IMAGE_FIRST = (PROMPT, IMAGE), (IMAGE, PROMPT)
_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states")
_CACHES = ("kv_cache_mode", "kv_cache")
_BLOCKS, _TWO_LISTS = ("transformer_blocks",), ("transformer_blocks", "single_transformer_blocks")
_CROSS = Family(_BLOCKS, ("attn1",), ("attn2",), refused=_RESIDUALS)
_WAN = Family(("blocks",), ("attn1",), ("attn2",))
_ONE = Family(_BLOCKS, ("attn",))
_LAYERS = Family(("layers",), ("attention",))
_FLUX = Family(
    *(_TWO_LISTS, ("attn",)),
    order=_TEXT_FIRST,
    returned=_TEXT_FIRST,
    refused=(*_RESIDUALS, *_CACHES),
)
_FLUX_3 = ("txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond", "single_transformer_blocks")
_COGVIEW = replace(_FLUX, stages=_BLOCKS, shared=("attn1",), returned=_IMAGE_FIRST)
_HUNYUAN = replace(_FLUX, order=_IMAGE_FIRST, returned=_IMAGE_FIRST)
_HUNYUAN_VIDEO = replace(_HUNYUAN, counted=(("num_tokens", IMAGE),))
_PAIRED = replace(_COGVIEW, pairs=True)
_JOY = replace(_HUNYUAN, stages=("double_blocks",))
_WITH_AUDIO = (
    ("attn1", IMAGE, IMAGE),
    ("audio_attn1", PROMPT, PROMPT),
    ("audio_to_video_attn", IMAGE, PROMPT),
    ("video_to_audio_attn", PROMPT, IMAGE),
)
_FUSED = (
    ("video_dec_block.self_attention", IMAGE, IMAGE),
    ("audio_dec_block.self_attention", PROMPT, PROMPT),
    ("va_cross_attention", IMAGE, PROMPT),
    ("av_cross_attention", PROMPT, IMAGE),
)
_LTX_2 = Family(
    *(_BLOCKS, tuple(name for name, _, _ in _WITH_AUDIO), ("attn2", "audio_attn2")),
    order=_IMAGE_FIRST,
    returned=_IMAGE_FIRST,
    refused=("video_self_attention_mask",),
    prompt="audio_hidden_states",
    streams=_WITH_AUDIO,
)
FAMILIES = {
    "AceStepTransformer1DModel": Family(("layers",), ("self_attn",), ("cross_attn",)),
    "AllegroTransformer3DModel": _CROSS,
    "AnyFlowTransformer3DModel": _WAN,
    "AuraFlowTransformer2DModel": replace(_FLUX, stages=("joint_transformer_blocks", "single_transformer_blocks")),
    "BriaFibo2Transformer2DModel": Family(("noise_refiner", "layers"), ("attention",), ("cross_attention",), image="x"),
    "BriaFiboTransformer2DModel": replace(_FLUX, stages=("transformer_blocks.*", "single_transformer_blocks.*")),
    "BriaTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": replace(_FLUX, pairs=True),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _COGVIEW,
    "CogView3PlusTransformer2DModel": _COGVIEW,
    "CogView4Transformer2DModel": _PAIRED,
    "ConsisIDTransformer3DModel": _COGVIEW,
    "Cosmos3OmniTransformer": Family(
        *(("layers",), ("self_attn",)),
        order=_TEXT_FIRST,
        returned=_TEXT_FIRST,
        image="gen_seq",
        prompt="und_seq",
        dim=0,
        prompt_alone=True,
    ),
    "CosmosTransformer3DModel": _CROSS,
    "DiTTransformer2DModel": _CROSS,
    "DreamLiteTransformer2DModel": _CROSS,
    "EasyAnimateTransformer3DModel": _COGVIEW,
    "ErnieImageTransformer2DModel": replace(_LAYERS, shared=("self_attention",), image="x", dim=0),
    "Flux2Transformer2DModel": _FLUX,
    "Flux3Transformer2DModel": replace(_FLUX, stages=_FLUX_3),
    "FluxTransformer2DModel": _FLUX,
    "GlmImageTransformer2DModel": _PAIRED,
    "HeliosTransformer3DModel": replace(_WAN, order=_TEXT_FIRST, last="original_context_length"),
    "HiDreamImageTransformer2DModel": replace(
        _HUNYUAN, stages=("double_stream_blocks.*", "single_stream_blocks.*"), shared=("block.attn1",)
    ),
    "HunyuanImageTransformer2DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": replace(_HUNYUAN, stages=_BLOCKS, pairs=True),
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN_VIDEO,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "Ideogram4Transformer2DModel": _LAYERS,
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "JoyImageEditTransformer3DModel": _JOY,
    "Kandinsky5Transformer3DModel": Family(
        *(("visual_transformer_blocks",), ("self_attention",), ("cross_attention",)),
        refused=("sparse_params",),
        image="visual_embed",
        prompt="text_embed",
    ),
    "Kandinsky6Transformer3DModel": Family(
        *(("visual_transformer_blocks",), tuple(name for name, _, _ in _FUSED)),
        ("video_dec_block.cross_attention", "audio_dec_block.cross_attention"),
        order=_IMAGE_FIRST,
        returned=_IMAGE_FIRST,
        image="vis",
        prompt="aud",
        streams=_FUSED,
    ),
    "Krea2Transformer2DModel": _ONE,
    "LTX2VideoTransformer3DModel": _LTX_2,
    "LTXVideoTransformer3DModel": _CROSS,
    "LatteTransformer3DModel": replace(_CROSS, stages=("transformer_blocks.*", "temporal_transformer_blocks.*")),
    "LongCatAudioDiTTransformer": Family(("blocks",), ("self_attn",), ("cross_attn",), prompt="cond"),
    "LongCatImageTransformer2DModel": _FLUX,
    "Lumina2Transformer2DModel": Family(("noise_refiner", "layers"), ("attn",)),
    "MiniMaxH3Transformer3DModel": _ONE,
    "MiniMaxMusic3Transformer1DModel": _ONE,
    "MochiTransformer3DModel": replace(_HUNYUAN, stages=_BLOCKS, shared=("attn1",), picks=True),
    "MotifVideoTransformer3DModel": replace(_HUNYUAN, counted=(("image_embed_seq_len", PROMPT),)),
    "OmniGenTransformer2DModel": replace(_LAYERS, shared=("self_attn",)),
    "OvisImageTransformer2DModel": _FLUX,
    "PRXTransformer2DModel": Family(("blocks",), ("attention",), order=_TEXT_FIRST),
    "PixArtTransformer2DModel": _CROSS,
    "QwenImage21Transformer2DModel": replace(_ONE, refused=_CACHES, segments=True),
    "QwenImageTransformer2DModel": replace(_FLUX, stages=_BLOCKS),
    "SD3Transformer2DModel": replace(_FLUX, stages=_BLOCKS, shared=("attn", "attn2"), order=_IMAGE_FIRST),
    "SanaWMLTX2RefinerTransformer3DModel": Family(_BLOCKS, _LTX_2.shared, _LTX_2.prompts, refused=_CACHES),
    "SkyReelsV2Transformer3DModel": _WAN,
    "Transformer2DModel": _CROSS,
    "WanAnimateTransformer3DModel": replace(_WAN, stages=("blocks.*",)),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(_WAN, stages=("vace_blocks blocks",)),
    "ZImageTransformer2DModel": replace(_LAYERS, stages=("noise_refiner", "layers"), image="x", refused=_RESIDUALS),
}
