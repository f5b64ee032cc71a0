"""The two datasets of an extraction, as MLflow knows datasets: name, digest, source, schema, profile.

MLflow keeps a dataset by name and digest, once an experiment, and never changes it: what is said here follows from the
bytes alone. Where a file or store lies now is in the run's tags.
"""

import json
from pathlib import Path
from typing import Any

from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource
from mlflow.entities import DatasetInput, InputTag

from tasks.errors import LineageError
from tasks.lineage.client import mlflow_digest
from tasks.storage import as_location, is_remote
from tasks.store.layout import Store
from tasks.store.manifest import check_contents
from tasks.store.shard import AUX, IDS, LAST, MASK

CONTEXT = "mlflow.data.context"  # tag of a dataset that is logged to a run
Column = tuple[str, str]  # name, type


class FileSource(DatasetSource):
    """Where a dataset's bytes are: a path, or `s3://`."""

    def __init__(self, uri: str):
        self.uri = uri

    def _get_source_type(self) -> str:
        """`local` or `s3`: of these MLflow's page shows the path. Any other word is shown as nothing."""
        return "s3" if self.uri.startswith("s3://") else "local"

    @property
    def path(self) -> Path:
        """Raises LineageError if it is not on this machine."""
        path = Path(self.uri.removeprefix("file://"))
        if "://" in str(path) or not path.exists():
            raise LineageError(f"{self.uri} is not on this machine: copy it here, or mount it, and name its path.")
        return path

    def load(self) -> Any:
        return self.path

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return isinstance(raw_source, (str, Path))

    @classmethod
    def _resolve(cls, raw_source: Any) -> "FileSource":
        return cls(str(raw_source))

    def to_dict(self) -> dict[str, str]:
        return {"uri": self.uri}

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> "FileSource":
        return cls(source_dict["uri"])


class StoreSource(FileSource):
    """A store of hidden states."""

    @property
    def store(self) -> Store:
        """The store where it lies, in a bucket too. Raises LineageError if it is on another machine."""
        return Store(as_location(self.uri) if is_remote(self.uri) else self.path)

    def load(self) -> Store:
        """The store, if it is what its manifest says; raises StoreError if not."""
        store = self.store
        check_contents(store)
        return store


class DescribedDataset(Dataset):
    """A dataset whose columns and figures are given in words and numbers."""

    def __init__(self, name: str, sha256: str, source: FileSource, columns: list[Column], profile: dict[str, int]):
        self._columns, self._profile = columns, profile
        super().__init__(source, name, mlflow_digest(sha256))

    @property
    def schema(self) -> list[Column]:
        """A name and a type for each column."""
        return self._columns

    @property
    def profile(self) -> dict[str, int]:
        return self._profile

    def to_dict(self) -> dict[str, str]:
        """In the form whose columns MLflow's page shows."""
        columns = [{"name": name, "type": kind} for name, kind in self._columns]
        described = {"schema": json.dumps({"mlflow_colspec": columns}), "profile": json.dumps(self._profile)}
        return {**super().to_dict(), **described}


class PromptsDataset(DescribedDataset):
    """The token ids that an extraction reads."""

    def __init__(self, name: str, sha256: str, source: FileSource, profile: dict[str, int]):
        """profile: `rows`, `tokens`, `bytes` of the file."""
        columns = [(IDS, "int32 [tokens]"), (MASK, "uint8 [tokens]"), ("id", "string")]
        super().__init__(name, sha256, source, columns, profile)


class HiddenStatesDataset(DescribedDataset):
    """A verified store."""

    def __init__(self, name: str, sha256: str, source: StoreSource, manifest: dict[str, Any]):
        """sha256: of manifest.json."""
        parts = manifest["parts"]
        dtype, hidden, layers = parts["dtype"], parts["hidden_size"], parts["layers"]
        columns = [
            (AUX, f"{dtype} [tokens, {len(layers)} * {hidden}]"),
            *((f"{AUX}: layer {layer}", f"{dtype} [tokens, {hidden}]") for layer in layers),
            (LAST, f"{dtype} [tokens, {hidden}], {parts['final_norm']}-norm"),
            (IDS, "int32 [tokens]"),
            (MASK, "uint8 [tokens]"),
        ]
        profile = {figure: manifest[figure] for figure in ("rows", "tokens", "bytes", "shards")}
        super().__init__(name, sha256, source, columns, profile | manifest["rows_by_state"])


def as_input(dataset: Dataset, context: str) -> DatasetInput:
    """The dataset as it is logged to a run."""
    return DatasetInput(dataset=dataset._to_mlflow_entity(), tags=[InputTag(CONTEXT, context)])


def context_of(logged: DatasetInput) -> str:
    """What the dataset was to the run that logged it."""
    return next((tag.value for tag in logged.tags if tag.key == CONTEXT), "")
