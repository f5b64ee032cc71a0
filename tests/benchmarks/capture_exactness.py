"""On a GPU: are the dumps the model's states? Small random models in bfloat16 against Hugging Face Transformers.

Two implementations of one bfloat16 model differ by rounding, and where a router's two best experts are nearly tied, by
a whole expert. Both are seen in Transformers' own float32 states, too: each token state's error against them is
compared with the error that Transformers' own bfloat16 run has.

    python -m tests.benchmarks.capture_exactness --out capture-exactness.json
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.benchmarks.gpu_server import facts, gpu_server, prefill_all
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=WIDER, default=list(WIDER), help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="raw JSON")
    options = parser.parse_args()
    choose = random.Random(20)
    prompts = [
        [choose.randrange(VOCABULARY) for _ in range(choose.choice([1, 2, choose.randint(3, LONGEST)]))]
        for _ in range(PROMPTS)
    ]
    result: dict[str, Any] = facts() | {"prompts": PROMPTS, "tokens": sum(map(len, prompts)), "runs": []}
    for family in options.families:
        CONFIGS[family] |= WIDER[family]
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model")
            make_checkpoint(family, model)
            exact = reference_states(model, prompts, torch.float32, "cuda")
            rounded = reference_states(model, prompts, torch.bfloat16, "cuda")
            for final_norm, chunk in (("post", 8192), ("post", 512), ("pre", 512)):
                arguments = [
                    "--dtype",
                    "bfloat16",
                    "--chunked-prefill-size",
                    str(chunk),
                    "--mem-fraction-static",
                    "0.3",
                ]
                capture = {"layers": CAPTURED, "final_norm": final_norm}
                with gpu_server(model, 31002, arguments, capture) as server:
                    _, dumps = prefill_all(server, "exact", prompts, keep=True)
                    run = compare(dumps, prompts, exact, rounded, final_norm)
                    run["left in staging"] = sorted(file.name for file in server.staging.iterdir())[:-PROMPTS]
                result["runs"].append({"family": family, "final norm": final_norm, "chunk": chunk, **run})
                print(json.dumps(result["runs"][-1]), flush=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")


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
