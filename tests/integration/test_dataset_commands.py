"""`prepare` and `export` as a user runs them: through Prefect, with their books on the terminal. No SGLang server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.export.run import MARK
from tasks.store.reader import HiddenStates
from tests.unit.chat import tokenizer_of, turns
from tests.unit.helpers import ROOT, write_jsonl
from tests.unit.verified import make_verified

pytestmark = pytest.mark.timeout(600)


def run(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DRILLCORE_HOME": str(tmp_path / "home"), "NO_COLOR": "1", "COLUMNS": "200"}
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "flows", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_conversations_are_prepared_by_one_command(tmp_path: Path) -> None:
    tokenizer_of("qwen3").save_pretrained(tmp_path / "tokenizer")
    records = [{"messages": turns(f"user: {at % 10}", "assistant: Hello there")} for at in range(20)]
    source = write_jsonl(tmp_path / "talks.jsonl", [*records, {"text": "no conversation"}])
    out = tmp_path / "dataset.jsonl"
    arguments = ("prepare", source, "--tokenizer", tmp_path / "tokenizer", "--max-seq-len", 512, "--out", out)
    refused = run(tmp_path, *arguments)
    assert refused.returncode == 2
    assert "DatasetError" in refused.stderr
    assert "talks.jsonl line 21: none of messages, conversations, input_ids" in refused.stderr
    assert not out.exists()
    done = run(
        tmp_path,
        *arguments,
        "--on-invalid",
        "skip",
        "--template-variable",
        "enable_thinking=false",
    )
    assert done.returncode == 0, done.stderr
    assert "21 records of 1 source(s)" in done.stdout
    assert "10 duplicate, 1 no conversation" in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer = tokenizer_of("qwen3")
    for row in rows:
        counted = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert tokenizer.decode(counted) == "Hello there<|im_end|>"
    manifest = json.loads((tmp_path / "dataset.jsonl.manifest.json").read_text())
    assert manifest["settings"]["template_variables"] == {"enable_thinking": False}
    assert (manifest["read"], manifest["rows"]) == (21, len(rows)) == (21, 10)


def test_a_store_is_exported_by_one_command(tmp_path: Path) -> None:
    small = make_verified(tmp_path, "pre")
    out = tmp_path / "out"
    arguments = ("export", small.store.root, "--to", "pt", "--out", out)
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "6 rows, 26 tokens to pt" in done.stdout
    for sample in HiddenStates.open(small.store.root):
        value = torch.load(out / f"rows_0-2000/{sample.row:06d}.pt", weights_only=True)
        assert torch.equal(value["last_hidden_state"], sample.last_hidden_state)
    assert json.loads((out / MARK).read_text())["complete"] is True
    assert sorted(os.listdir(out)) == [MARK, "rows_0-2000"]
    (out / "rows_0-2000/000003.pt").unlink()
    again = run(tmp_path, *arguments)
    assert again.returncode == 0, again.stderr
    assert "this run   1 rows" in again.stdout
    refused = run(tmp_path, "export", small.store.root, "--to", "modelopt", "--out", out)
    assert refused.returncode == 2
    assert "format: it has 'pt', this export has 'modelopt'" in refused.stderr
