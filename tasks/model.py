"""What an extraction must know of a checkpoint, read from its files without loading a weight."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import ModelError
from tasks.files import sha256_of_json

if TYPE_CHECKING:  # a trainer that reads a store needs no configs
    from tasks.config import CaptureConfig

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes an element
SAMPLES, SAMPLE_BYTES = 16, 64 << 10  # of each file's weights, evenly spread, for the identity
HEADER_LIMIT = 100 << 20  # bytes: the safetensors format's own limit


@dataclass(frozen=True)
class Model:
    """A checkpoint: its shape and an identity that changes when its files do."""

    path: Path
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    identity: str
    """SHA-256 over config.json and the name, size, header and samples of every safetensors file."""


def read_model(path: Path) -> Model:
    """Read `config.json` (a wrapper's `text_config` inside counts) and the safetensors headers.

    Raises ModelError naming the file or the field.
    """
    config_path = path / "config.json"
    try:
        config = json.loads(config_path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is not a checkpoint: {config_path} does not exist (model.path).") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{config_path} cannot be read: {error}") from error
    text = config.get("text_config") or config

    def number(field: str) -> int:
        value = text.get(field)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{config_path} has no usable {field}: {value!r}")
        return value

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no *.safetensors file (model.path). Pickled checkpoints are not supported.")
    return Model(
        path=path,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        layers=number("num_hidden_layers"),
        hidden_size=number("hidden_size"),
        vocab_size=number("vocab_size"),
        max_positions=number("max_position_embeddings"),
        identity=_identity(config, files),
    )


def capture_layers(model: Model, capture: "CaptureConfig") -> list[int]:
    """The decoder layers to store, by their outputs: `capture.layers` translated from its convention.

    'eagle3' is [1, n // 2 - 1, n - 4] for n layers. Raises ModelError that names the ids.
    """
    count, asked = model.layers, capture.layers
    if isinstance(asked, str):
        chosen = [1, count // 2 - 1, count - 4]
    elif capture.layer_convention == "output":
        chosen = asked
    else:
        chosen = [layer - 1 for layer in asked]
        if capture.layer_convention == "vllm" and chosen[-1:] == [count - 1]:
            if capture.final_norm != "pre":
                raise ModelError(
                    f"capture.layers = {asked} ends with {count}, which in the 'vllm' convention is the final state "
                    "before the norm: set capture.final_norm to 'pre', or leave that number out."
                )
            chosen = chosen[:-1]
    if not chosen or chosen != sorted(set(chosen)) or not all(0 <= layer < count - 1 for layer in chosen):
        raise ModelError(
            f"capture.layers = {asked} (convention '{capture.layer_convention}') gives the outputs of layers {chosen}: "
            f"they must ascend, between 0 and {count - 2}. The model has {count} layers, and the output of the last "
            "one is the final state, which is always stored."
        )
    return chosen


def _identity(config: dict[str, Any], files: list[Path]) -> str:
    parts = []
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_LIMIT:
                raise ModelError(f"{file} is not a safetensors file: its header would be {length} bytes long.")
            digest = hashlib.sha256(stream.read(length))
            size = file.stat().st_size
            # All of a 1T model would take minutes; another training step changes every sample.
            for sample in range(SAMPLES):
                stream.seek(8 + length + (size - 8 - length) * sample // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
            parts.append([file.name, size, digest.hexdigest()])
    return sha256_of_json({"config": config, "files": parts})
