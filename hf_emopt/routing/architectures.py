"""The registry of families, and the families themselves: which matrices each stores in one parameter.

A rule belongs to the class that *uses* the parameter, since the layout shows only in its ``forward``: the module is
found by its class name (or by a predicate on its attributes), the parameter by its name relative to that module.
Nothing is imported from the libraries that define the classes. The layouts were read in transformers 5.24; tests
compare them with what the modules compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from hf_emopt.routing import attention, blocks
from hf_emopt.routing.parameter import ArchitectureRule, Decision, ParameterInfo, class_names

_BY_CLASS: dict[str, list[ArchitectureRule]] = {}
_PREDICATES: list[tuple[Callable[[nn.Module], bool], ArchitectureRule]] = []


def register_architecture(match: str | Callable[[nn.Module], bool], rule: ArchitectureRule) -> Callable[[], None]:
    """Adds a rule for the parameters inside a kind of module.

    Rules of the module nearest to the parameter are asked first; of one module, class names before predicates, and the
    rule registered last before earlier ones. The first answer that is not None counts, and comes before every rule by
    module type. ``matrix_modules`` and ``aux_modules`` of :func:`route_parameters` come before all rules.

    Args:
        match: class name of the module that uses the parameter (a base class's name matches too), or a predicate on it.
        rule: ``rule(parameter, module, relative) -> Decision | None``, see :data:`ArchitectureRule`.

    Returns:
        A function that removes the rule again.

    Example::

        def wqkv(parameter, module, relative):
            if relative == "wqkv.weight":
                return matrix(rows(parameter.shape, [("q", 512), ("k", 128), ("v", 128)]), "fused q, k, v")

        register_architecture("MyAttention", wqkv)
    """
    if isinstance(match, str):
        _BY_CLASS.setdefault(match, []).append(rule)
        return lambda: _BY_CLASS[match].remove(rule)
    entry = (match, rule)
    _PREDICATES.append(entry)
    return lambda: _PREDICATES.remove(entry)


def _rules(module: nn.Module) -> Iterator[ArchitectureRule]:
    for name in class_names(module):
        yield from reversed(_BY_CLASS.get(name, ()))
    for predicate, rule in reversed(_PREDICATES):
        if predicate(module):
            yield rule


def family_rule(parameter: ParameterInfo) -> Decision | None:
    """Answer of the registered rules, or None when no rule knows the parameter."""
    for relative, module in parameter.chain:
        for rule in _rules(module):
            decision = rule(parameter, module, relative)
            if decision is not None:
                return decision
    return None


def _register_families() -> None:
    """The one table of families."""
    for name in ("GPT2Attention", "ImageGPTAttention", "DecisionTransformerGPT2Attention"):
        register_architecture(name, attention.gpt2)
    # GPT (1) names its class plainly "Attention"; its `c_attn` is a Conv1D, which no other "Attention" has.
    register_architecture(attention.has_conv1d_attention, attention.gpt2)
    for name in ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"):
        register_architecture(name, attention.per_head_qkv("query_key_value"))
    register_architecture("FalconAttention", attention.falcon)
    register_architecture("GPTBigCodeAttention", attention.gpt_bigcode)
    register_architecture("CodeGenAttention", attention.codegen)
    register_architecture("MiniMaxLightningAttention", attention.per_head_qkv("qkv_proj"))
    register_architecture("DisentangledSelfAttention", attention.per_head_qkv("in_proj"))  # DeBERTa (1)
    for name in ("Phi3Attention", "Phi4MultimodalAttention"):
        register_architecture(name, attention.concatenated_qkv("qkv_proj"))
    for name in ("ModernBertAttention", "MptAttention", "DbrxAttention"):
        register_architecture(name, attention.concatenated_qkv("Wqkv"))
    register_architecture("BarkSelfAttention", attention.concatenated_qkv("att_proj"))
    register_architecture("LayoutLMv2SelfAttention", attention.concatenated_qkv("qkv_linear"))
    for name in _VISION_QKV:
        register_architecture(name, attention.concatenated_qkv("qkv"))
    for name in ("JetMoeAttention", "GraniteSpeechConformerAttention"):
        register_architecture(name, blocks.concatenated("kv_proj", blocks.equal("k", "v"), "attention"))
        register_architecture(name, blocks.concatenated("to_kv", blocks.equal("k", "v"), "attention"))
    for name in ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention", "Qwen4ExpTextAttention"):
        register_architecture(name, attention.gated_query)
    register_architecture("Qwen3NextGatedDeltaNet", attention.qwen3_next_delta)
    for name in (
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Qwen4ExpTextGatedDeltaNet",
        "LaraMiniGatedDeltaNet",
    ):
        register_architecture(name, blocks.concatenated("in_proj_qkv", blocks.delta_parts, "attention"))
    for name in ("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "Zamba2MambaMixer", "NemotronHMamba2Mixer"):
        register_architecture(name, blocks.concatenated("in_proj", blocks.mamba2_parts, "linear"))
    register_architecture("GraniteMoeHybridMambaLayer", blocks.concatenated("in_proj", blocks.mamba2_parts, "linear"))
    for name in ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"):
        register_architecture(name, blocks.concatenated("in_proj", blocks.equal("x", "z"), "linear"))
        register_architecture(name, blocks.concatenated("x_proj", blocks.mamba_parts, "linear"))
    register_architecture("ZambaMambaMixer", blocks.zamba_in_proj)
    for name in ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"):
        register_architecture(name, blocks.concatenated("in_proj", blocks.equal("B", "C", "x"), "linear"))
    register_architecture(attention.is_latent_attention, attention.latent_attention)
    for name in ("ModernBertMLP", "ModernBertDecoderMLP"):
        register_architecture(name, blocks.concatenated("Wi", blocks.equal("input", "gate"), "linear"))
    for name in ("GraniteMoeSharedMLP", "GraniteMoeHybridMLP"):
        register_architecture(name, blocks.concatenated("input_linear", blocks.equal("gate", "up"), "linear"))
    # `gate_up_proj` names a convention that vLLM shares: two equal blocks of rows (Phi-3, GLM-4, Dia ...).
    register_architecture(
        lambda m: isinstance(m._modules.get("gate_up_proj"), nn.Module),
        blocks.concatenated("gate_up_proj", blocks.equal("gate", "up"), "linear"),
    )
    register_architecture(
        "Phi4MultimodalAudioMLP", blocks.concatenated("gate_up_proj", blocks.equal("up", "gate"), "linear")
    )
    register_architecture(blocks.has_layout_flags, blocks.flagged_experts)
    register_architecture("Llama4TextExperts", blocks.plain_experts(transposed=True))
    for name in ("LongcatFlashExperts", "Step3p7Experts"):
        register_architecture(name, blocks.plain_experts(transposed=False))
    for name in ("Gemma3MultiModalProjector", "T5Gemma2MultiModalProjector"):
        register_architecture(name, blocks.bare_projection("mm_input_projection_weight"))
    register_architecture("DbrxExpertGLU", blocks.dbrx_experts)
    register_architecture("JetMoeMoE", blocks.jetmoe_input)
    register_architecture("XLNetRelativeAttention", blocks.xlnet)
    register_architecture(lambda m: isinstance(m, nn.MultiheadAttention), blocks.multihead_attention)
    register_architecture(lambda m: isinstance(m, (nn.RNNBase, nn.RNNCellBase)), blocks.recurrent)


# Vision towers whose `qkv` is reshaped to (tokens, 3, heads, head_dim), i.e. [q; k; v] along the outputs.
_VISION_QKV = (
    "BlipAttention", "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention", "MgpstrAttention",
    "TimesformerSelfAttention", "HieraMaskUnitAttention", "SegGptAttention", "VitDetAttention", "SamVisionAttention",
    "SamHQVisionAttention", "Sam2MultiScaleAttention", "GotOcr2VisionAttention", "Florence2VisionChannelAttention",
    "Florence2VisionWindowAttention", "VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention",
    "Qwen3VLMoeVisionAttention", "Qwen3OmniMoeVisionAttention", "Qwen3_5VisionAttention", "Qwen3_5MoeVisionAttention",
    "Glm4vVisionAttention", "Glm4vMoeVisionAttention", "GlmOcrVisionAttention", "GlmImageVisionAttention",
    "Ernie4_5_VLMoeVisionAttention", "Exaone4_5_VisionAttention", "DeepseekOcr2SamVisionAttention",
    "CohereCompassVisionAttention", "Glm5NextVisionAttention", "PPFormulaNetVisionAttention", "Qwen4ExpVisionAttention",
    "UnlimitedOcrSamVisionAttention", "Dots3NoteVisionAttention", "SLANeXtVisionAttention",
)  # fmt: skip

_register_families()
