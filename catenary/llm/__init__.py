"""Offline batches in one process, without servers."""
