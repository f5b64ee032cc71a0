"""Trains one EAGLE-3 drafter with SpecForge on a CPU: run by the trainers' Python.

`--states stored` trains on the store's export; `--states transformers` on what Transformers computes for the same token
ids, in files of the same form: the loss must fall on the one as on the other. SpecForge 0.2.0 imports Triton for its
loss; where there is none, its own PyTorch reference of that loss, in the same file, takes its place.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch is imported

import torch

BATCH = 8  # rows a step
EMBEDDING = "model.embed_tokens.weight"  # the target's head, too: they are tied
LOGGED = re.compile(r"^step (\d+): (\{.*\})$", re.MULTILINE)
SHAPE = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_act"),
    *(
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "attention_bias",
        "attention_dropout",
        "head_dim",
    ),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def replace_the_loss() -> None:
    """Import SpecForge's loss without Triton, and let its reference be used."""
    importlib.import_module("torch._dynamo")  # which must not see the stubs

    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.__dict__.update(jit=lambda function: function, language=language)
    language.__dict__["constexpr"] = object
    stubs = {"triton": triton, "triton.language": language}
    sys.modules.update(stubs)
    import specforge.core.loss as loss

    for name in stubs:
        del sys.modules[name]
    loss.LogSoftmaxLoss = type("Reference", (), {"apply": staticmethod(loss._compute_loss)})


def compute_states(source: Path, target: Path, model: Path, layers: list[int]) -> None:
    """The same rows with the states that Transformers computes."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    for file in sorted(source.rglob("data_*.ckpt")):
        row = torch.load(file, weights_only=True)
        with torch.inference_mode():
            every = network.model(row["input_ids"][None], output_hidden_states=True).hidden_states
        aux = torch.cat([every[layer + 1] for layer in layers], dim=-1)
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The last of Transformers' states is the one after the final norm.
        torch.save(row | {"aux_hidden_state": aux.clone(), "hidden_state": every[-1].clone()}, path)


def write_config(options: argparse.Namespace, train: Path, held_out: Path) -> Path:
    """SpecForge's own settings; the target's folder gets the list of weight files that it wants."""
    model = options.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    for file in options.model.iterdir():
        link = model / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    weights = {"metadata": {}, "weight_map": {EMBEDDING: "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(weights))
    of_target = json.loads((model / "config.json").read_text())
    drafter = {name: of_target[name] for name in SHAPE} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": of_target["rope_parameters"]["rope_theta"],
        "draft_vocab_size": options.draft_vocab_size,
    }
    (options.out / "drafter.json").write_text(json.dumps(drafter))
    rows = len(list(train.rglob("data_*.ckpt")))
    settings = {
        "model": {
            "target_model_path": str(model),
            "draft_model_config": str(options.out / "drafter.json"),
            "lm_head_key": EMBEDDING,
            "vocab_mapping_path": str(options.train / "vocab_mapping/vocab_mapping.pt"),
        },
        "data": {
            "hidden_states_path": str(train),
            "eval_hidden_states_path": str(held_out),
            "max_length": 512,
            "dataloader_num_workers": 0,
            "cache_dir": str(options.out / "cache"),
        },
        "training": {
            "num_epochs": options.epochs,
            "batch_size": BATCH,
            "fsdp_sharding": "NO_SHARD",  # the others want an accelerator
            "attention_backend": "sdpa",
            "learning_rate": 1e-3,
            "ttt_length": 1,
            "log_interval": 10,
            "eval_interval": max(1, rows // BATCH),
        },
        "output_dir": str(options.out / "checkpoints"),
    }
    path = options.out / "run.json"
    path.write_text(json.dumps(settings, indent=1))
    return path


class Tee(io.TextIOBase):
    """Writes through, and keeps what was written."""

    def __init__(self, through: Any):
        self.through, self.kept = through, io.StringIO()

    def write(self, text: str) -> int:
        self.kept.write(text)
        return int(self.through.write(text))

    def flush(self) -> None:
        self.through.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--train", "--held-out", "--model", "--out", "--result"):
        parser.add_argument(name, type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--states", choices=("stored", "transformers"), required=True)
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="0-based")
    for name in ("--epochs", "--draft-vocab-size"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    train, held_out = options.train, options.held_out
    options.out.mkdir(parents=True, exist_ok=True)
    if options.states == "transformers":
        train, held_out = options.out / "states/train", options.out / "states/held-out"
        compute_states(options.train, train, options.model, options.layers)
        compute_states(options.held_out, held_out, options.model, options.layers)
    config = write_config(options, train, held_out)
    replace_the_loss()
    from specforge.cli import main as specforge

    with contextlib.redirect_stdout(Tee(sys.stdout)) as printed:
        if code := specforge(["train", "--config", str(config)]):
            sys.exit(code)
    logged = [(int(step), ast.literal_eval(values)) for step, values in LOGGED.findall(printed.kept.getvalue())]
    result = {"states": options.states, "epochs": options.epochs, "logged": logged}
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
