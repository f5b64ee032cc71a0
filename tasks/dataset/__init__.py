"""The input: tokenized samples in a JSONL file, read, judged and planned."""
