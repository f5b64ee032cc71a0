"""The input: tokenized samples in JSON lines, packed or not, or in Parquet: read, judged and planned."""
