"""SGLang plugin for CPU servers: closes gaps of the CPU path of SGLang 0.5.17 and 0.5.23.

Loaded only where SGLANG_USE_CPU_ENGINE=1. Promise: the model stays SGLang's own; only the choice of code path and what
moves rows between ranks changes, and a bfloat16 product is still summed in float32 and rounded once.
"""

import os

import torch
from torch.overrides import TorchFunctionMode

TOKENIZER_SET_UP = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_tokenizer_and_processor"
PAD_FOR_DP_ATTENTION = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch"
LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


def text_only(original, self, *args, **kwargs):
    """Set up the tokenizer side as for a text model: a multimodal wrapper (Kimi-K2.5) then needs no image processor."""
    multimodal = self.model_config.is_multimodal
    self.model_config.is_multimodal = False
    try:
        return original(self, *args, **kwargs)
    finally:
        self.model_config.is_multimodal = multimodal


class Unpinned(TorchFunctionMode):
    """Makes PyTorch's calls below it ignore `pin_memory`, which a machine without an accelerator refuses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinned_memory(original, *args, **kwargs):
    """Pad a batch for DP attention: 0.5.17 wants pinned memory for the counts of tokens on every device."""
    with Unpinned():
        return original(*args, **kwargs)


def copy_rows(target, source, dim, offset, rows, offset_source):
    """Copy `rows` rows (a tensor, as `offset`) from row `offset` of the source or to row `offset` of the target."""
    here, there = slice(int(rows)), slice(int(offset), int(offset) + int(rows))
    target[here if offset_source else there] = source[there if offset_source else here]


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
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # torch_native keeps the KV cache of MLA models in absorbed form, so prefill must take the absorbed path too.
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    # DP attention's padding asks for the length of a request that is not there, 0.5.17 by the first name and 0.5.23 by
    # the second: 1 is the smallest legal one, and what other backends say.
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    if not hasattr(dp_attention, "memcpy_cpu"):  # 0.5.17 has the kernel only
        dp_attention.memcpy_triton = copy_rows
    HookRegistry.register(TOKENIZER_SET_UP, text_only, HookType.AROUND)
    HookRegistry.register(PAD_FOR_DP_ATTENTION, without_pinned_memory, HookType.AROUND)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        HookRegistry.register(LINEAR, linear_in_float32, HookType.AROUND)
