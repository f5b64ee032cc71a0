"""Trains one EAGLE-3 drafter with speculators on a CPU and measures it: run by the trainers' Python.

speculators 0.9.0 expects an accelerator in two places; both are replaced here, no file of it is changed. `--variant`
spoils what the drafter is given, in training and in the measurement; the token that it must guess is never spoiled: it
is the target's own greedy one, lm_head(norm(state)), over the whole vocabulary, computed here and not by the trainer.
"""

import argparse
import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AUX = 3  # states before the final one, in each file
LEARNING_RATE = "1e-3"


def spoiler(variant: str, norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is done to the states [tokens, AUX + 1, hidden] of a row before a drafter is trained on them."""

    def zero(states: torch.Tensor) -> torch.Tensor:
        states[:, :AUX] = 0
        return states

    def shifted(states: torch.Tensor) -> torch.Tensor:
        states[:, :AUX] = states[:, :AUX].roll(1, dims=0)
        return states

    def wrong_norm(states: torch.Tensor) -> torch.Tensor:
        states[:, AUX] = norm(states[:, AUX])
        return states

    return {"right": lambda states: states, "zero": zero, "shifted": shifted, "wrong norm": wrong_norm}[variant]


def spoil(source: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write each file's states anew."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("hs_*.safetensors"):
        tensors = load_file(file)
        save_file(tensors | {"hidden_states": change(tensors["hidden_states"].clone())}, target / file.name)


def train(options: argparse.Namespace, states: Path) -> None:
    """By speculators' own command line."""
    import speculators.train.trainer as trainer

    if torch.accelerator.current_accelerator() is None:
        trainer.get_local_rank = lambda: "cpu"  # where the model and the batches go
        torch.accelerator.synchronize = lambda *_, **__: None  # the step timer's
    from speculators.__main__ import app

    shutil.rmtree(options.out / "checkpoints", ignore_errors=True)  # of a training that was cut short
    layers = json.loads((options.home / "hidden-states/extraction.json").read_text())["parts"]["layers"]
    sys.argv = [
        *("speculators", "train", "--verifier-name-or-path", str(options.model)),
        *("--data-path", str(options.home / "train"), "--hidden-states-path", str(states)),
        *("--speculator-type", "eagle3", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
        *("--hidden-states-dtype", "float32", "--num-workers", "0", "--on-missing", "raise"),
        *("--target-layer-ids", *(str(layer + 1) for layer in layers)),  # vLLM's numbers
        *("--lr", LEARNING_RATE, "--optimizer", "muon", "--draft-vocab-size", str(options.draft_vocab_size)),
        *("--total-seq-len", "1024", "--ttt-steps", "1", "--epochs", str(options.epochs), "--log-freq", "10"),
        *("--train-data-ratio", "0.95", "--no-resume-from-checkpoint"),
        *("--save-path", str(options.out / "checkpoints"), "--log-dir", str(options.out / "logs")),
    ]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def measure(options: argparse.Namespace, change: Callable[[torch.Tensor], torch.Tensor], target: Any) -> dict[str, Any]:
    """How often the first guess is the target's greedy token, on each held-out row; and the bigram table's."""
    from datasets import load_from_disk
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    folders = [path for path in (options.out / "checkpoints").iterdir() if path.name.isdecimal()]
    checkpoint = max(folders, key=lambda path: int(path.name))  # the last epoch: nothing is chosen by held-out rows
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    drafter = Eagle3DraftModel.from_pretrained(checkpoint, config=config).float().eval()
    rows = load_from_disk(options.home / "held-out")
    follows = bigrams(load_from_disk(options.home / "train"))
    hits: list[tuple[int, int, int]] = []
    with torch.inference_mode():
        for number in range(len(rows)):
            tensors = load_file(options.home / f"held-out/hidden_states/hs_{number}.safetensors")
            states, ids = tensors["hidden_states"], tensors["token_ids"]
            greedy = target.lm_head(target.model.norm(states[:, AUX])).argmax(-1)
            given = change(states.clone())[:-1, :AUX].flatten(1)[None].float()
            length = len(ids) - 1
            guess = drafter(
                hidden_states=given,
                input_ids=ids[1:][None],
                document_ids=torch.zeros(1, length, dtype=torch.long),
                position_ids=torch.arange(1, length + 1)[None],
                ttt_steps=1,
            )[0][0]
            guess = guess + drafter.d2t[guess]
            # From the states up to p and token p + 1, the drafter guesses token p + 2: the target's greedy[p + 1].
            counts = rows[number]["loss_mask"][1:].bool()
            counts[-1] = False  # what follows the end is nobody's answer
            table = torch.tensor([follows.get(int(token), -1) for token in ids[1:]])
            right = greedy[1:]
            drafted, tabled = (int(((found == right) & counts).sum()) for found in (guess, table))
            hits.append((int(counts.sum()), drafted, tabled))
    return {
        "variant": options.variant,
        "epochs": options.epochs,
        "checkpoint": str(checkpoint),
        "columns": ["positions", "drafter", "bigram"],
        "rows": hits,
    }


def bigrams(rows: Any) -> dict[int, int]:
    """The token that follows each one most often in the answers of the training rows."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for row in rows:
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        for before, token, counted in zip(ids, ids[1:], mask[1:]):
            if counted:
                counts[before][token] += 1
    return {before: following.most_common(1)[0][0] for before, following in counts.items()}


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--home", "--model", "--out", "--result"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--variant", required=True)
    for name in ("--epochs", "--draft-vocab-size"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    change = spoiler(options.variant, target.model.norm)
    states = options.home / "train/hidden_states"
    with torch.inference_mode():
        if options.variant != "right":
            spoil(states, options.out / "hidden_states", change)
            states = options.out / "hidden_states"
    train(options, states.resolve())
    result = measure(options, change, target)
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
