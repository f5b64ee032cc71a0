"""Rows of a Parquet file, a few at a time, whatever the size of its row groups."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.dataset.formats import COLUMNS, MASK

ROWS = 256  # at a time: 50 MB where each has 8,192 tokens in int64 columns


def read_tables(table: pq.ParquetFile, first_group: int = 0) -> Iterator[pa.RecordBatch]:
    """The rows from a row group on, the columns of a sample only; a mask of booleans becomes one of integers."""
    columns = [name for name in COLUMNS if name in table.schema_arrow.names]
    groups = list(range(first_group, table.num_row_groups))
    for batch in table.iter_batches(ROWS, row_groups=groups, columns=columns):
        if MASK in columns and pa.types.is_boolean(batch.schema.field(MASK).type.value_type):
            at = batch.schema.get_field_index(MASK)
            batch = batch.set_column(at, MASK, batch.column(at).cast(pa.list_(pa.uint8())))
        yield batch


def values_of(batch: pa.RecordBatch, at: int) -> dict[str, Any]:
    """One row of a batch, as a line of JSON would hold it."""
    return {name: batch.column(name)[at].as_py() for name in batch.schema.names}
