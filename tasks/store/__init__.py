"""The store: shards of hidden states with a commit record each, in a directory that knows what made it."""
