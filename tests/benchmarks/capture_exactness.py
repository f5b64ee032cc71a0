"""On a GPU: are the dumps the model's states? Small random models in bfloat16 against Hugging Face Transformers.

Two implementations of one bfloat16 model differ by rounding, and where a router's two best experts are nearly tied, by
a whole expert. Both are seen in Transformers' own float32 states, too: each token state's error against them is
compared with the error that Transformers' own bfloat16 run has. All servers are up at once.

    python -m tests.benchmarks.capture_exactness --out capture-exactness.json
"""

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tasks.config import parse_config
from tasks.files import write_json
from tasks.server.launch import ManagedServer
from tests.benchmarks.gpu_server import facts, prefill_all, prepare_server, running, server_arguments
from tests.integration.tiny_models import CONFIGS, LAYERS, VOCABULARY, make_checkpoint, reference_states

CAPTURED = list(range(LAYERS - 1))
# The tiny models of the CPU tests, as wide as GPU kernels want them.
WIDER: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128},
    "deepseek-v3": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
PROMPTS, LONGEST = 96, 1900
CASES = ("post:8192", "pre:512")  # the final state taken, and most tokens of one forward pass
CACHE_TOKENS = 65_536


@dataclass(frozen=True)
class Case:
    """A server with one way to capture."""

    family: str
    final_norm: str
    chunk: int
    server: ManagedServer


def main() -> None:
    options = _options()
    choose = random.Random(20)
    prompts = [
        [choose.randrange(VOCABULARY) for _ in range(choose.choice([1, 2, choose.randint(3, LONGEST)]))]
        for _ in range(options.prompts)
    ]
    result: dict[str, Any] = facts(options.device) | {"prompts": len(prompts), "tokens": sum(map(len, prompts))}
    result["runs"] = []
    with tempfile.TemporaryDirectory(prefix="drillcore-benchmark-", dir="/dev/shm") as folder:
        cases, references = [], {}
        for family in options.families:
            CONFIGS[family] |= WIDER[family]
            model = Path(folder, family)
            make_checkpoint(family, model)
            cases += [_case(family, case, Path(folder), options) for case in options.cases]
            references[family] = [
                reference_states(model, prompts, dtype, options.device) for dtype in (torch.float32, torch.bfloat16)
            ]
        with running([case.server for case in cases]):
            for case in cases:
                staging = case.server.staging
                _, dumps = prefill_all(case.server.url, "exact", prompts, staging, keep=True)
                run = {"family": case.family, "final norm": case.final_norm, "chunk": case.chunk}
                run |= compare(dumps, prompts, *references[case.family], case.final_norm)
                left = {file.name for file in staging.iterdir() if file not in dumps}
                run["left in staging"] = sorted(name for name in left if not name.startswith(("ready.", "owner.")))
                result["runs"].append(run)
                print(json.dumps(run), flush=True)
                write_json(options.out, result)


def _case(family: str, case: str, folder: Path, options: argparse.Namespace) -> Case:
    final_norm, _, chunk = case.partition(":")
    values = {
        "name": "exactness",
        "dataset": {"path": str(folder / "unused"), "max_seq_len": LONGEST},
        "model": {"path": str(folder / family)},
        "capture": {"layers": CAPTURED, "final_norm": final_norm},
        "server": {
            "device": options.device,
            "chunked_prefill_size": int(chunk),
            "arguments": server_arguments(options.device, CACHE_TOKENS),
        },
        "staging": {"path": str(folder / "staging")},
        "output": {"path": str(folder / "unused")},
    }
    log = options.out.absolute().with_name(f"{options.out.stem}.{family}-{final_norm}-{chunk}.log")
    server = prepare_server(parse_config(values, "of the benchmark"), CAPTURED, log)
    return Case(family, final_norm, int(chunk), server)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=WIDER, default=list(WIDER), help="default: all")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NORM:CHUNK", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="raw JSON; logs are written beside it")
    return parser.parse_args()


def compare(
    dumps: list[Path],
    prompts: list[list[int]],
    exact: list[torch.Tensor],
    rounded: list[torch.Tensor],
    final_norm: str,
) -> dict[str, Any]:
    """Errors (L2, relative, a token and state) against Transformers in float32; the same of its bfloat16."""
    ours, theirs, health, chunks = [], [], [], 0
    for dump, ids, reference, other in zip(dumps, prompts, exact, rounded, strict=True):
        with safe_open(dump, framework="pt") as file:
            metadata = json.loads(file.metadata()["drillcore"])
            aux, last, found = (
                file.get_tensor(name) for name in ("aux_hidden_states", "last_hidden_state", "input_ids")
            )
        assert found.tolist() == ids
        assert metadata["zero_rows"] == metadata["nonfinite_rows"] == [0] * LAYERS
        states = torch.stack([*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last]).float()
        # The references hold all layers' outputs and the final state after the norm.
        wanted = slice(0, LAYERS) if final_norm == "pre" else [*CAPTURED, LAYERS]
        ours.append(relative(states, reference[wanted]).flatten())
        theirs.append(relative(other[wanted].float(), reference[wanted]).flatten())
        rms = states.square().mean(dim=(1, 2)).sqrt()
        health.append(((rms - torch.tensor(metadata["rms"])) / rms).abs().max())
        chunks = max(chunks, metadata["chunks"])
    mine, his = torch.cat(ours), torch.cat(theirs)
    return {
        "token states": len(mine),
        "median error": float(mine.median()),
        "median error of Transformers' bfloat16": float(his.median()),
        "above 0.1": int((mine > 0.1).sum()),
        "above 0.1 in Transformers' bfloat16": int((his > 0.1).sum()),
        "largest error": float(mine.max()),
        "largest error of Transformers' bfloat16": float(his.max()),
        "most chunks": chunks,
        "health figures differ by at most": float(torch.stack(health).max()),
    }


def relative(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (states - reference).norm(dim=-1) / reference.norm(dim=-1)


if __name__ == "__main__":
    main()
