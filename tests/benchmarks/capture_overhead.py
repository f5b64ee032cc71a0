"""What the capture costs a GPU server: prefill throughput with the plugin against the same server without it.

Both servers are up at once on one card; they are measured in turn, `--pairs` times, on the same prompts, 64 in flight.
Weights are random (`--load-format dummy`): the work is the same. Dumps go to shared memory and are deleted when seen.

    python -m tests.benchmarks.capture_overhead llama-8b --out capture-overhead-llama-8b.json
"""

import argparse
import contextlib
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_server import facts, gpu_server, prefill_all

VOCABULARY = 32_768
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    # Hidden size and attention of DeepSeek-V3 and Kimi-K2.5; as many layers and experts as two servers have room for.
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
SHARED = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
WARM_UP = 64  # prompts: kernels compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=512, help="of 512 to 3,584 tokens (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="alternating runs (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens a forward pass (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="raw JSON")
    options = parser.parse_args()
    shape = SHARED | SHAPES[options.shape]
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    capture = {"layers": [1, layers // 2 - 1, layers - 4], "final_norm": "post"}
    lengths = random.Random(20)
    prompts = [
        [lengths.randrange(VOCABULARY) for _ in range(lengths.randint(512, 3584))] for _ in range(options.prompts)
    ]
    tokens = sum(map(len, prompts))
    arguments = ["--load-format", "dummy", "--max-total-tokens", "262144", "--mem-fraction-static", "0.9"]
    arguments += ["--chunked-prefill-size", str(options.chunk)]
    runs: dict[str, list[float]] = {"bare": [], "capture": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        Path(folder, "config.json").write_text(json.dumps(shape))
        up = {
            "bare": servers.enter_context(gpu_server(Path(folder), 31000, arguments, None)),
            "capture": servers.enter_context(gpu_server(Path(folder), 31001, arguments, capture)),
        }
        for server in up.values():
            prefill_all(server, "warm", prompts[:WARM_UP])
        for pair in range(options.pairs):
            for name, server in up.items():
                seconds, _ = prefill_all(server, f"{name}{pair}", prompts)
                runs[name].append(tokens / seconds)
                print(f"{options.shape} {name} {pair}: {runs[name][-1]:,.0f} tokens/s", flush=True)
    kept = [with_capture / bare for with_capture, bare in zip(runs["capture"], runs["bare"], strict=True)]
    rate = statistics.median(runs["capture"])
    result = facts() | {
        "shape": options.shape,
        "prompts": len(prompts),
        "tokens": tokens,
        "chunk": options.chunk,
        "bytes a token": (len(capture["layers"]) + 1) * hidden * 2,
        "tokens a second": runs,
        "kept": kept,
        "median kept": statistics.median(kept),
        "bytes a second": rate * (len(capture["layers"]) + 1) * hidden * 2,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
