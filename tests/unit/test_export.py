"""Exports hold the store's values in each trainer's fields, appear whole, resume, and refuse what would mislead.

Here their files are read by the documented fields; tests/integration/test_trainers.py opens them with the trainers' own
classes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tasks.errors import ConfigError, DrillcoreError, ModelError, OutputError, SpaceError, StoreError
from tasks.export.formats import pack_mask
from tasks.export.norm import FinalNorm
from tasks.export.run import MARK, ExportJob, export_shard, finish_export, open_export
from tasks.export.vocabulary import count_tokens, map_vocabulary
from tasks.store.reader import HiddenStates
from tests.unit.helpers import HIDDEN, SmallStore
from tests.unit.verified import make_checkpoint, make_verified

ROWS = [0, 1, 2, 3, 5, 6]


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    return make_verified(tmp_path_factory.mktemp("post"))


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    return make_verified(tmp_path_factory.mktemp("pre"), "pre")


def export(small: SmallStore, to: str, output: Path, **options: Any) -> dict[str, Any]:
    job = open_export(small.store.root, to, output, **options)
    for shard in range(len(job.shards)):
        export_shard(job, shard)
    return finish_export(job)


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path, weights_only=True)
    return value


def normed(state: torch.Tensor, model: Path) -> torch.Tensor:
    """The norm by its definition: x / sqrt(mean(x^2) + eps) * weight, in float32."""
    weight = load_file(model / "model.safetensors")["model.norm.weight"].float()
    values = state.float()
    scale = (values.square().mean(-1, keepdim=True) + 0.001).rsqrt()
    return (values * scale * weight).to(state.dtype)


def test_specforge_has_its_fields(post: SmallStore, tmp_path: Path) -> None:
    export(post, "specforge", tmp_path / "out")
    files = sorted((tmp_path / "out").rglob("*.ckpt"))
    assert [file.relative_to(tmp_path / "out").as_posix() for file in files] == [
        f"rows_0-2000/data_{row}.ckpt" for row in ROWS
    ]
    for file, sample in zip(files, HiddenStates.open(post.store.root), strict=True):
        value = read(file)
        assert set(value) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
        assert (value["input_ids"].dtype, value["loss_mask"].dtype) == (torch.int64, torch.int64)
        assert value["input_ids"].tolist() == sample.input_ids.tolist()
        assert value["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert torch.equal(value["aux_hidden_state"], sample.aux_hidden_states[None])
        assert torch.equal(value["hidden_state"], sample.last_hidden_state[None])


def test_a_file_holds_its_own_row_only(post: SmallStore, tmp_path: Path) -> None:
    """torch.save writes a view's whole storage, which here is the shard's."""
    for to in ("specforge", "modelopt", "torchspec", "pt"):
        export(post, to, tmp_path / to)
        file = next(file for ending in ("ckpt", "pt") for file in sorted((tmp_path / to).rglob(f"*.{ending}")))
        tensors = [value for value in read(file).values() if isinstance(value, torch.Tensor)]
        assert all(one.untyped_storage().nbytes() == one.numel() * one.element_size() for one in tensors)


def test_speculators_has_its_fields(pre: SmallStore, tmp_path: Path) -> None:
    export(pre, "speculators", tmp_path / "out", draft_vocab_size=12)
    out, states = tmp_path / "out", HiddenStates.open(pre.store.root)
    with pa.OSFile(str(out / "data-00000-of-00001.arrow")) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all().to_pylist()
    for place, (row, sample) in enumerate(zip(table, states, strict=True)):
        value = load_file(out / f"hidden_states/hs_{place}.safetensors")
        assert set(value) == {"hidden_states", "token_ids"}
        assert value["hidden_states"].shape == (len(sample.input_ids), 3, HIDDEN)
        assert torch.equal(value["hidden_states"][:, 0], sample.layer(1))
        assert torch.equal(value["hidden_states"][:, 1], sample.layer(4))
        assert torch.equal(value["hidden_states"][:, 2], sample.last_hidden_state)
        assert value["token_ids"].dtype == torch.int64
        assert value["token_ids"].tolist() == row["input_ids"] == sample.input_ids.tolist()
        assert (row["loss_mask"], row["seq_len"]) == (sample.loss_mask.tolist(), len(sample.input_ids))
    frequency = torch.load(out / "token_freq.pt", weights_only=True)
    assert frequency == {
        int(token): 1 for sample in states for token in sample.input_ids[sample.loss_mask == 1].tolist()
    }
    assert np.load(out / "d2t-12.npy").shape == (12,)
    assert np.load(out / "t2d-12.npy").sum() == 12


def test_modelopt_has_its_fields(post: SmallStore, tmp_path: Path) -> None:
    export(post, "modelopt", tmp_path / "out")
    for sample in HiddenStates.open(post.store.root):
        value = read(tmp_path / f"out/rows_0-2000/{sample.row:06d}.pt")
        assert value["conversation_id"] == f"sample-{sample.row}"
        assert value["hidden_states_prenorm"] is False
        assert torch.equal(value["input_ids"], sample.input_ids.long())
        assert torch.equal(value["loss_mask"], sample.loss_mask.long())
        assert torch.equal(value["hidden_states"], sample.last_hidden_state)
        assert torch.equal(value["aux_hidden_states"], sample.aux_hidden_states)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_torchspec_has_its_fields(norm: str, tmp_path: Path) -> None:
    """As its OfflineDataset reads them: the state as it is, with the word which one it is."""
    small = make_verified(tmp_path, norm)
    out = tmp_path / "out"
    export(small, "torchspec", out)
    assert json.loads((out / "dataset.json").read_text()) == {
        "version": 1,
        "last_hidden_states_prenorm": norm == "pre",
    }
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    for line, sample in zip(lines, HiddenStates.open(small.store.root), strict=True):
        value = read(out / line["file"])
        assert line["split"] == "train"
        assert value["data_id"] == line["data_id"] == f"row-{sample.row:06d}"
        assert value["metadata"] == {"row": sample.row, "id": f"sample-{sample.row}"}
        assert torch.equal(value["input_ids"], sample.input_ids.long()[None])
        assert torch.equal(value["hidden_states"], sample.aux_hidden_states[None])
        assert torch.equal(value["last_hidden_states"], sample.last_hidden_state[None])
        lengths = [int(length) for length in value["packed_loss_mask"].split(",")]
        unpacked = [place % 2 for place, length in enumerate(lengths) for _ in range(length)]
        assert unpacked == sample.loss_mask.tolist()


@pytest.mark.parametrize(
    ("mask", "packed"),
    [([0, 0, 1, 1], "2,2"), ([1, 1, 0], "0,2,1"), ([0], "1"), ([1], "0,1"), ([0, 1, 0, 1], "1,1,1,1")],
)
def test_masks_are_packed_as_runs_of_which_the_first_is_of_zeros(mask: list[int], packed: str) -> None:
    assert pack_mask(mask) == packed


def test_plain_files_have_everything(pre: SmallStore, tmp_path: Path) -> None:
    export(pre, "pt", tmp_path / "out")
    for sample in HiddenStates.open(pre.store.root):
        value = read(tmp_path / f"out/rows_0-2000/{sample.row:06d}.pt")
        assert (value["row"], value["id"]) == (sample.row, f"sample-{sample.row}")
        assert (value["layers"], value["final_norm"]) == ([1, 4], "pre")
        assert torch.equal(value["input_ids"], sample.input_ids)
        assert torch.equal(value["last_hidden_state"], sample.last_hidden_state)
        assert torch.equal(value["aux_hidden_states"], sample.aux_hidden_states)


# Norm


def test_states_after_the_norm_are_refused_where_the_trainer_norms_itself(post: SmallStore, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"speculators applies the model's final norm itself.*capture.final_norm: pre"
    ):
        open_export(post.store.root, "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "field"), [("specforge", "hidden_state"), ("modelopt", "hidden_states")])
def test_states_before_the_norm_are_normed_where_the_trainer_does_not(
    pre: SmallStore, tmp_path: Path, to: str, field: str
) -> None:
    assert export(pre, to, tmp_path / "out")["final_norm"] == "post"
    model = pre.store.root.parent / "model"
    for file, sample in zip(sorted((tmp_path / "out/rows_0-2000").iterdir()), HiddenStates.open(pre.store.root)):
        assert torch.equal(read(file)[field].reshape(-1, HIDDEN), normed(sample.last_hidden_state, model))


def test_another_checkpoints_norm_is_refused(pre: SmallStore, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text().replace("0.001", "0.1"))
    with pytest.raises(ModelError, match="is not the model that these hidden states are of"):
        open_export(pre.store.root, "specforge", tmp_path / "out", model=other)
    same = make_checkpoint(tmp_path / "same")
    assert open_export(pre.store.root, "specforge", tmp_path / "out", model=same).norm is not None


def test_the_norm_is_that_of_the_definition(pre: SmallStore) -> None:
    model = pre.store.root.parent / "model"
    identity = json.loads(pre.store.extraction.read_text())["parts"]["model_identity"]
    states = torch.randn((7, HIDDEN)) * 30
    torch.testing.assert_close(FinalNorm(model, identity)(states), normed(states, model))


# Draft vocabulary


def test_the_most_frequent_tokens_make_the_draft_vocabulary() -> None:
    counts = np.array([0, 5, 0, 2, 2, 0, 9])
    d2t, t2d = map_vocabulary(counts, 3)
    assert (torch.arange(3) + d2t).tolist() == [1, 3, 6]  # of 3 and 4, as frequent as each other, the lower one
    assert t2d.nonzero().flatten().tolist() == [1, 3, 6]
    d2t, _ = map_vocabulary(counts, 6)
    assert (torch.arange(6) + d2t).tolist() == [0, 1, 2, 3, 4, 6]
    with pytest.raises(ConfigError, match="vocabulary has 7 ids"):
        map_vocabulary(counts, 8)


def test_only_tokens_that_count_are_counted(post: SmallStore) -> None:
    counts = count_tokens(HiddenStates.open(post.store.root), np.array([0, 1]))
    assert np.flatnonzero(counts).tolist() == [1, 2, 12, 13, 14]


def test_specforge_gets_its_mapping(post: SmallStore, tmp_path: Path) -> None:
    export(post, "specforge", tmp_path / "out", draft_vocab_size=12)
    mapping = read(tmp_path / "out/vocab_mapping/vocab_mapping.pt")
    counts = count_tokens(HiddenStates.open(post.store.root), np.arange(6))
    d2t, t2d = map_vocabulary(counts, 12)
    assert torch.equal(mapping["d2t"], d2t)
    assert torch.equal(mapping["t2d"], t2d)


# Resuming


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("to", ["specforge", "speculators", "modelopt", "torchspec", "pt"])
def test_an_export_that_was_ended_goes_on_and_comes_to_the_same(pre: SmallStore, tmp_path: Path, to: str) -> None:
    mark = export(pre, to, tmp_path / "whole")
    job = open_export(pre.store.root, to, tmp_path / "out")
    export_shard(job, 1)
    began = files_of(tmp_path / "out")
    assert json.loads(began.pop(MARK))["complete"] is False
    (tmp_path / "out/.data_9.ckpt.123.tmp").write_bytes(b"half")
    assert export(pre, to, tmp_path / "out") == mark
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert began.items() <= files_of(tmp_path / "out").items()
    assert mark["complete"] is True


def test_what_is_there_is_not_written_again(post: SmallStore, tmp_path: Path) -> None:
    export(post, "pt", tmp_path / "out")
    job = open_export(post.store.root, "pt", tmp_path / "out")
    assert [export_shard(job, shard) for shard in range(len(job.shards))] == [(0, 0)] * 3


def test_a_write_that_fails_leaves_no_file_and_no_mark(
    post: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(value: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    job = open_export(post.store.root, "pt", tmp_path / "out")
    with pytest.raises(OSError, match="No space left"):
        export_shard(job, 0)
    assert set(files_of(tmp_path / "out")) == {MARK}
    assert json.loads((tmp_path / "out" / MARK).read_text())["complete"] is False


def test_a_part_of_the_rows_is_numbered_from_its_own_beginning(pre: SmallStore, tmp_path: Path) -> None:
    mark = export(pre, "speculators", tmp_path / "out", rows="2:5")
    assert (mark["rows"], mark["exported_rows"], mark["tokens"]) == ([2, 5], 3, 12)
    found = [load_file(tmp_path / f"out/hidden_states/hs_{place}.safetensors")["token_ids"][0] for place in range(3)]
    assert found == [20, 30, 50]


Begin = Callable[[SmallStore, Path], ExportJob]
REFUSED: dict[str, tuple[Begin, type[DrillcoreError], str]] = {
    "another format": (
        lambda small, out: open_export(small.store.root, "modelopt", out),
        OutputError,
        "holds another export:\n  format: it has 'pt', this export has 'modelopt'",
    ),
    "other rows": (
        lambda small, out: open_export(small.store.root, "pt", out, rows=":3"),
        OutputError,
        r"rows: it has \[0, 6\], this export has \[0, 3\]",
    ),
    "no such rows": (
        lambda small, out: open_export(small.store.root, "pt", out, rows="9:"),
        ConfigError,
        "--rows 9:: the store has 6 rows",
    ),
    "rows that are no range": (
        lambda small, out: open_export(small.store.root, "pt", out, rows="-1"),
        ConfigError,
        "not of the form START:STOP",
    ),
    "a draft vocabulary that the format has not": (
        lambda small, out: open_export(small.store.root, "pt", out, draft_vocab_size=5),
        ConfigError,
        "pt takes none; specforge, speculators do",
    ),
    "another folder's content": (
        lambda small, out: open_export(small.store.root, "pt", small.store.root),
        OutputError,
        "is not empty and holds no export",
    ),
}


@pytest.mark.parametrize(("begin", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(
    post: SmallStore, tmp_path: Path, begin: Begin, error: type[DrillcoreError], message: str
) -> None:
    export(post, "pt", tmp_path / "out")
    before = files_of(tmp_path / "out")
    with pytest.raises(error, match=message):
        begin(post, tmp_path / "out")
    assert files_of(tmp_path / "out") == before


def test_a_store_that_is_not_verified_is_not_exported(tmp_path: Path) -> None:
    small = make_verified(tmp_path)
    small.store.manifest.unlink()
    with pytest.raises(StoreError, match="not verified"):
        open_export(small.store.root, "pt", tmp_path / "out")


def test_a_store_that_was_verified_anew_is_another_one(post: SmallStore, tmp_path: Path) -> None:
    export(post, "pt", tmp_path / "out")
    mark = json.loads((tmp_path / "out" / MARK).read_text())
    (tmp_path / "out" / MARK).write_text(json.dumps(mark | {"store_manifest_sha256": "0" * 64}))
    with pytest.raises(OutputError, match="store_manifest_sha256"):
        open_export(post.store.root, "pt", tmp_path / "out")


def test_a_full_disk_is_found_before_anything_is_written(
    post: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.export.run.free_bytes", lambda path: 1 << 20)
    with pytest.raises(SpaceError, match="6 rows need"):
        open_export(post.store.root, "pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
