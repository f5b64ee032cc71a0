"""SGLang plugin for CPU servers: closes three gaps of SGLang 0.5.23's torch_native path.

Loaded only where SGLANG_USE_CPU_ENGINE=1. Promise: the model stays SGLang's own; only the choice of code path
changes, and a bfloat16 product is still summed in float32 and rounded once.
"""

import os

import torch

TOKENIZER_SET_UP = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_tokenizer_and_processor"
LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


def text_only(original, self, *args, **kwargs):
    """Set up the tokenizer side as for a text model: a multimodal wrapper (Kimi-K2.5) then needs no image processor."""
    multimodal = self.model_config.is_multimodal
    self.model_config.is_multimodal = False
    try:
        return original(self, *args, **kwargs)
    finally:
        self.model_config.is_multimodal = multimodal


def linear_in_float32(original, method, layer, x, bias=None):
    """A bfloat16 linear layer by a float32 product.

    Without AVX-512, PyTorch multiplies bfloat16 matrices 7 times slower than float32 ones. Costs 4 more bytes a
    weight, which a model small enough for a CPU can pay.
    """
    if x.dtype != torch.bfloat16 or layer.weight.dtype != torch.bfloat16:
        return original(method, layer, x, bias)
    weight = getattr(layer, "drillcore_weight", None)
    if weight is None:
        weight = layer.drillcore_weight = layer.weight.detach().float()
    product = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    return product.to(torch.bfloat16)


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # torch_native keeps the KV cache of MLA models in absorbed form, so prefill must take the absorbed path too.
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):
        # Asked for by DP attention's padding, which must not attend to anything: length 1 is the smallest legal one.
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    HookRegistry.register(TOKENIZER_SET_UP, text_only, HookType.AROUND)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        HookRegistry.register(LINEAR, linear_in_float32, HookType.AROUND)
