"""The extraction itself: rows are prefilled within one limit for the whole run, their dumps become shards."""
