"""Trains a small EAGLE-3 drafter on hidden states of ours, and measures it: `make drafter`.

The proof that the data is right. SmolLM2 answers prompts greedily, served by our server; its answers are prepared,
extracted with the final state before the norm, exported, and a drafter is trained by speculators on the CPU. What
counts is how often its first guess is the target's own greedy token, on prompts whose form and topic training never
saw; beside it, drafters of the same settings whose states were spoiled, and a table of what follows which token.
SpecForge then trains on the same store, and on what Transformers computes for the same tokens: its loss must fall
alike.

What is there already is kept: the same command goes on. The trainers' Python is .venv-trainers.
"""

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from deployments import demo
from tasks.config import load_config
from tasks.dataset.manifest import manifest_path
from tasks.dataset.prepare.run import prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig
from tasks.files import write_atomic, write_json
from tasks.lineage.drafter import drafter_run
from tasks.model import capture_layers, read_model
from tasks.patching import check_signatures, find_installation
from tasks.server import guardian
from tasks.server.launch import ManagedServer

CONFIG = Path("deployments/configs/drafter.yaml")
HOME = Path(".drillcore/drafter")
TRAINERS = Path(".venv-trainers/bin/python")
PROGRAM = Path("deployments/drafter_training.py")
SPECFORGE = Path("deployments/drafter_specforge.py")
ANSWER_TOKENS = 64
AT_ONCE = 64  # requests
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # several at a time, each on a core of its own, are faster than one on all
TRAININGS = min(6, os.cpu_count() or 1)  # at a time; each takes some 3 GB of memory
DRAFT_VOCABULARY = 8192
VARIANTS = ("right", "zero", "shifted", "wrong norm")
SPECFORGE_EPOCHS = 3
STATES = {"stored": "our states", "transformers": "states by Transformers"}
RESAMPLES = 2000

# Forms and topics of training, and those of the held-out part: none is in both.
FORMS = (
    ("Explain {} to a child.", "Write a short poem about {}.", "List three facts about {}.", "Why does {} matter?"),
    ("What is the history of {}?", "Describe {} in two sentences.", "Give me advice about {}.", "What is {}?"),
    ("Compare {} with something similar.", "Write a letter about {}.", "How would you teach {}?", "Summarize {}."),
    ("Tell me a story about {}.", "What do people get wrong about {}?", "Name the parts of {}.", "Praise {}."),
    ("Ask me five questions about {}.", "Write a slogan for {}.", "What would a world without {} be?", "Define {}."),
)
HELD_OUT_FORMS = (
    "Write a dialogue in which two friends argue over {}.",
    "Plan a week in which I learn about {}.",
    "Which mistakes do beginners make with {}?",
    "Write a news report on {}.",
    "Invent a riddle whose answer is {}.",
    "What would you ask an expert on {}?",
    "Write instructions for somebody who has never seen {}.",
    "Argue against {}, politely.",
)
TOPICS = (
    *("the moon", "bread", "chess", "rivers", "the printing press", "bees", "democracy", "volcanoes", "the violin"),
    *("winter", "money", "bicycles", "photosynthesis", "the Roman Empire", "sleep", "mathematics", "whales", "tea"),
    *("trains", "friendship", "the internet", "gravity", "gardens", "languages", "glass", "football", "maps", "clouds"),
)
HELD_OUT_TOPICS = (
    *("lighthouses", "salt", "jazz", "deserts", "the telescope", "honesty", "bridges", "vaccines", "ants", "theatre"),
)


def prompts() -> list[tuple[str, str]]:
    """(id, prompt): those of training first; ids of the held-out ones begin with 'held-out'."""
    training = itertools.product(itertools.chain(*FORMS), TOPICS)
    held_out = itertools.product(HELD_OUT_FORMS, HELD_OUT_TOPICS)
    return [
        (f"{name}-{number}", form.format(topic))
        for name, pairs in (("train", training), ("held-out", held_out))
        for number, (form, topic) in enumerate(pairs)
    ]


def answer(target: Path) -> None:
    """Let the served model answer every prompt greedily; write token ids, masked on the answer."""
    from transformers import AutoTokenizer

    config = load_config(CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    installation = find_installation(config.server.interpreter)
    assert installation is not None
    check_signatures(installation)
    layers = capture_layers(read_model(config.model.path), config.capture)
    server = ManagedServer(config, installation, layers, HOME / "answers.server.log")
    # Decoding on a CPU is many small operations: threads that wait for each other make it slower.
    server.environment.update(ONE_THREAD)
    try:
        server.start()
        asked = [
            (name, tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True))
            for name, text in prompts()
        ]
        questions = [(name, list(ids["input_ids"])) for name, ids in asked]
        answers = asyncio.run(_ask(server.url, [ids for _, ids in questions], tokenizer.eos_token_id))
    finally:
        server.stop()
    lines = [
        json.dumps({"id": name, "input_ids": ids + said, "loss_mask": [0] * len(ids) + [1] * len(said)})
        for (name, ids), said in zip(questions, answers, strict=True)
    ]
    write_atomic(target, ("\n".join(lines) + "\n").encode())


async def _ask(url: str, questions: list[list[int]], end: int) -> list[list[int]]:
    limit = asyncio.Semaphore(AT_ONCE)
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "stop_token_ids": [end]}

    async def ask(session: aiohttp.ClientSession, ids: list[int]) -> list[int]:
        body = {"input_ids": ids, "sampling_params": sampling}
        async with limit, session.post(f"{url}/generate", json=body) as reply:
            reply.raise_for_status()
            said: list[int] = (await reply.json())["output_ids"]
            return said

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(ask(session, ids) for ids in questions))


def prepare(source: Path, target: Path) -> None:
    """In their order, so that the held-out rows are the last."""
    config = load_config(CONFIG)
    prepare_dataset(
        PrepareConfig(
            sources=[source.absolute()],
            tokenizer=config.model.path,
            output=target.absolute(),
            max_seq_len=config.dataset.max_seq_len,
            shuffle=False,
            workers=1,
        )
    )


def run(*arguments: object) -> None:
    """One of our commands, a process of its own; ends this one if it fails."""
    if code := _guarded([sys.executable, "-m", "flows", *arguments]):
        sys.exit(code)


def _guarded(command: list[Any], **settings: Any) -> int:
    """A command's exit code; it ends with this process, whatever ends this."""
    words = [sys.executable, guardian.__file__, *map(str, command)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, **settings) as process:
        return process.wait()


def train(variant: str, epochs: int) -> dict[str, Any]:
    """Train one drafter by speculators and measure it; returns the measurement."""
    folder = HOME / "drafters" / variant.replace(" ", "-")
    options = ["--variant", variant, "--home", HOME, "--model", demo.MODEL, "--epochs", epochs]
    return _by_trainer(PROGRAM, folder, epochs, options)


def train_specforge(states: str) -> dict[str, Any]:
    """Train one drafter by SpecForge; returns what it logged."""
    layers = json.loads((HOME / "hidden-states/extraction.json").read_text())["parts"]["layers"]
    options = ["--states", states, "--train", HOME / "specforge/train", "--held-out", HOME / "specforge/held-out"]
    options += ["--model", demo.MODEL, "--epochs", SPECFORGE_EPOCHS, "--layers", *layers]
    return _by_trainer(SPECFORGE, HOME / "specforge/drafters" / states, SPECFORGE_EPOCHS, options)


def _by_trainer(program: Path, folder: Path, epochs: int, options: list[Any]) -> dict[str, Any]:
    """What a program wrote as its result, run by the trainers' Python unless it has done that already."""
    result = folder / f"result-{epochs}.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [TRAINERS, program, *options, "--draft-vocab-size", DRAFT_VOCABULARY, "--out", folder]
        log = folder / "training.log"
        command += ["--result", result]
        with log.open("wb") as file:
            code = _guarded(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | ONE_THREAD)
        if code:
            sys.exit(f"The training in {folder} failed: see {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def register(store: Path, measured: dict[str, Any]) -> None:
    """Tell MLflow of the drafter, once."""
    checkpoint = Path(measured["checkpoint"]).absolute()
    mark = checkpoint / "registered.json"
    if mark.exists():
        return
    hits = np.array(measured["rows"])
    with drafter_run(store, name="smollm2-eagle3", model_uri=checkpoint) as training:
        training.log_metrics({"first_guess": float(hits[:, 1].sum() / hits[:, 0].sum())})
    write_json(mark, {"name": training.name, "version": training.version, "run": training.run_id})


def table(results: dict[str, dict[str, Any]]) -> str:
    """What each came to, as lines. Rows are drawn again for the intervals: the positions of one are not independent."""
    hits = {variant: np.array(result["rows"]) for variant, result in results.items()}
    positions, ours, bigram = hits["right"].T
    names = {
        "wrong norm": "drafter, final state after the norm",
        "shifted": "drafter, states shifted by one token",
        "zero": "drafter, states all zero",
    }
    measured = [("table of what follows which token", bigram)]
    measured += [(name, hits[variant][:, 1]) for variant, name in names.items() if variant in hits]
    drawn = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))

    def cells(found: np.ndarray) -> list[str]:
        low, high = np.percentile(found[drawn].sum(axis=1) / positions[drawn].sum(axis=1), [2.5, 97.5])
        return [f"{found.sum() / positions.sum():.3f}", f"{low:.3f} to {high:.3f}"]

    lines = [["what the first guess comes from", "hits", "95% interval", "ours has more", "95% interval"]]
    lines += [[name, *cells(found), *cells(ours - found)] for name, found in measured]
    lines += [["drafter, our states", *cells(ours), "", ""]]
    text = "\n".join(f"  {a:<37} {b:>6}  {c:<15} {d:>14}  {e}".rstrip() for a, b, c, d, e in lines)
    return f"{text}\n  {positions.sum():,} positions of {len(ours)} held-out answers, at each the target's greedy token"


def specforge_table(results: dict[str, dict[str, Any]]) -> str:
    """SpecForge's own numbers on the held-out rows, after each epoch."""
    lines = [f"  {'SpecForge, held out, after each epoch':<37} {'loss':<22} first guess"]
    for states, result in results.items():
        evaluated = [values for _, values in result["logged"] if "eval/avg_loss" in values]
        losses, shares = (
            " ".join(f"{values[name]:.3f}" for values in evaluated) for name in ("eval/avg_loss", "eval/avg_acc")
        )
        lines.append(f"  {STATES[states]:<37} {losses:<22} {shares}")
    return "\n".join(lines)


def main() -> int:
    os.chdir(demo.ROOT)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="of each drafter (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="train just these (default: all)")
    options = parser.parse_args()
    if not TRAINERS.exists():
        sys.exit("There is no .venv-trainers: run `make drafter`, which builds it.")
    HOME.mkdir(parents=True, exist_ok=True)
    if not demo.MODEL.exists():
        demo.MODEL.parent.mkdir(parents=True, exist_ok=True)
        demo.make_checkpoint(demo.MODEL)
    answers, dataset, store = HOME / "answers.jsonl", HOME / "dataset.jsonl", HOME / "hidden-states"
    if not answers.exists():
        print(f"  answers    {len(prompts())} prompts, greedily -> {answers}", file=sys.stderr, flush=True)
        answer(answers)
    if not manifest_path(dataset).exists():
        dataset.unlink(missing_ok=True)
        prepare(answers, dataset)
    run("extract", CONFIG)
    rows = [json.loads(line)["id"] for line in dataset.read_text().splitlines()]
    first = next(number for number, name in enumerate(rows) if name.startswith("held-out"))
    for trainer, folder in (("speculators", HOME), ("specforge", HOME / "specforge")):
        for part, span in (("train", f":{first}"), ("held-out", f"{first}:")):
            vocabulary = ["--draft-vocab-size", DRAFT_VOCABULARY] if part == "train" else []
            run("export", store, "--to", trainer, "--out", folder / part, "--rows", span, *vocabulary)
    with ThreadPoolExecutor(TRAININGS) as pool:
        trained = {variant: pool.submit(train, variant, options.epochs) for variant in options.only or VARIANTS}
        logged = {states: pool.submit(train_specforge, states) for states in (STATES if not options.only else ())}
        print(
            f"  train      {len(trained)} with speculators, {len(logged)} with SpecForge", file=sys.stderr, flush=True
        )
        results = {variant: done.result() for variant, done in trained.items()}
        if "right" in results:
            register(store, results["right"])
            print(f"\n{table(results)}", flush=True)
        if logged:
            print(f"\n{specforge_table({states: done.result() for states, done in logged.items()})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
