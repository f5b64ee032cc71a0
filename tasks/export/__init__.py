"""Exports: a store's rows as the files that a trainer reads. One store, written once, feeds them all."""
