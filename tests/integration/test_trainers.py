"""Each export is opened by that trainer's own code, from its PyPI package: every value is the store's.

The packages are in .venv-trainers (`make .venv-trainers/.ready`, which `make test` does). TorchSpec is not on PyPI: its
files are read by their documented fields, in tests/unit/test_export.py.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tasks.export.norm import FinalNorm
from tasks.export.run import export_shard, finish_export, open_export
from tasks.store.layout import read_extraction
from tasks.store.reader import HiddenStates, Sample
from tests.integration.trainer_readers import DRAFT_VOCAB
from tests.unit.helpers import ROOT, SmallStore
from tests.unit.verified import make_verified

PYTHON = ROOT / ".venv-trainers/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-trainers: make .venv-trainers/.ready builds it")


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    """States before the norm: they serve every trainer."""
    return make_verified(tmp_path_factory.mktemp("pre"), "pre")


def read_by(trainer: str, small: SmallStore, tmp_path: Path, vocabulary: int | None) -> list[dict[str, torch.Tensor]]:
    """The samples that the trainer's own code makes of an export, in its order; then its draft vocabulary, if any."""
    job = open_export(small.store.root, trainer, tmp_path / "export", draft_vocab_size=vocabulary)
    for shard in range(len(job.shards)):
        export_shard(job, shard)
    finish_export(job)
    program = Path(__file__).with_name("trainer_readers.py")
    command = [PYTHON, program, trainer, tmp_path / "export", tmp_path / "result.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    samples: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(tmp_path / "result.safetensors").items():
        number, _, field = name.partition(".")
        samples.setdefault(int(number), {})[field] = tensor
    return [samples[number] for number in sorted(samples)]


def stored(small: SmallStore) -> list[Sample]:
    return list(HiddenStates.open(small.store.root))


def norm_of(small: SmallStore) -> FinalNorm:
    extraction = read_extraction(small.store)
    assert extraction is not None
    return FinalNorm(Path(extraction["config"]["model"]["path"]), extraction["parts"]["model_identity"])


def test_specforge(pre: SmallStore, tmp_path: Path) -> None:
    counting = len({int(token) for one in stored(pre) for token in one.input_ids[one.loss_mask == 1]})
    *samples, vocabulary = read_by("specforge", pre, tmp_path, counting)
    norm = norm_of(pre)
    for found, one in zip(samples, stored(pre), strict=True):
        mask = one.loss_mask.long()
        mask[-1] = 0  # SpecForge's own doing
        assert torch.equal(found["input_ids"], one.input_ids.long()[None])
        assert torch.equal(found["loss_mask"], mask[None])
        assert torch.equal(found["hidden_state"], one.aux_hidden_states[None])
        assert torch.equal(found["target"], norm(one.last_hidden_state)[None])
    ours = torch.load(tmp_path / "export/vocab_mapping/vocab_mapping.pt", weights_only=True)
    assert torch.equal(vocabulary["d2t"], ours["d2t"])
    assert torch.equal(vocabulary["t2d"], ours["t2d"])


def test_speculators(pre: SmallStore, tmp_path: Path) -> None:
    *samples, vocabulary = read_by("speculators", pre, tmp_path, DRAFT_VOCAB)
    for found, one in zip(samples, stored(pre), strict=True):
        assert torch.equal(found["input_ids"], one.input_ids.long())
        assert torch.equal(found["loss_mask"], one.loss_mask.long())
        assert torch.equal(found["hidden_states"], one.aux_hidden_states)
        assert torch.equal(found["verifier_last_hidden_states"], one.last_hidden_state)
    for name in ("d2t", "t2d"):
        assert vocabulary[name].tolist() == np.load(tmp_path / f"export/{name}-{DRAFT_VOCAB}.npy").tolist()


def test_modelopt(pre: SmallStore, tmp_path: Path) -> None:
    norm = norm_of(pre)
    for found, one in zip(read_by("modelopt", pre, tmp_path, None), stored(pre), strict=True):
        assert torch.equal(found["input_ids"], one.input_ids.long())
        assert torch.equal(found["loss_mask"], one.loss_mask.long())
        assert torch.equal(found["aux_hidden_states"], one.aux_hidden_states)
        assert torch.equal(found["base_model_hidden_states"], norm(one.last_hidden_state))
        assert not found["base_hidden_prenorm"]
