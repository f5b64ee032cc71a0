"""Weights of a checkpoint as numbers, whatever they are packed in: plain, fp8 in blocks, int4 in groups."""

from collections.abc import Callable

import torch

from tasks.checkpoint import Checkpoint
from tasks.errors import NoReferenceError

WeightReader = Callable[[str], torch.Tensor]


def weight_reader(checkpoint: Checkpoint) -> WeightReader:
    """A function that reads a linear layer's weight [out, in] by the layer's name, as `layers.0.mlp.up_proj`: float32,
    or as it is stored where it is not packed.

    Raises NoReferenceError for a packing that is not known here.
    """
    config = checkpoint.text.get("quantization_config") or checkpoint.config.get("quantization_config")

    def read_plain(name: str) -> torch.Tensor:
        return checkpoint.read(f"{name}.weight")

    if config is None:
        return read_plain
    method = config.get("quant_method")
    if method == "fp8" and (block := config.get("weight_block_size")):

        def read_fp8(name: str) -> torch.Tensor:
            if not checkpoint.has(f"{name}.weight_scale_inv"):  # left out of the quantization
                return read_plain(name)
            weight, scale = checkpoint.read(f"{name}.weight"), checkpoint.read(f"{name}.weight_scale_inv")
            return dequantize_blocks(weight, scale, block)

        return read_fp8
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        packed = config.get("format") == "pack-quantized" and groups
        if packed and all({**group, **wanted} == group and not group.get("actorder") for group in groups):

            def read_int4(name: str) -> torch.Tensor:
                if not checkpoint.has(f"{name}.weight_packed"):
                    return read_plain(name)
                parts = (checkpoint.read(f"{name}.weight_{part}") for part in ("packed", "scale", "shape"))
                return dequantize_int4(*parts)

            return read_int4
    raise NoReferenceError(f"weights packed by {method!r} in this way are not known here")


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
    """fp8 [out, in] times a scale for each block of `block` (rows, columns) values: float32 [out, in]."""
    rows, columns = block
    scales = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float() * scales[: weight.shape[0], : weight.shape[1]]


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Signed 4-bit numbers, 8 in an int32 from its low end on, times a scale for each group: float32 [out, in].

    packed: int32 [out, in / 8]; each number is stored with 8 added. scale: [out, groups]. shape: (out, in).
    """
    out, width = shape.tolist()
    # As bytes: a shift of the int32 would widen all of them eightfold before the cut.
    data = packed.view(torch.uint8)  # little endian: the first number is the first byte's low half
    numbers = torch.stack([data & 15, data >> 4], dim=-1).view(out, -1)[:, :width].float() - 8
    return (numbers.view(out, scale.shape[1], -1) * scale.float()[..., None]).view(out, width)
