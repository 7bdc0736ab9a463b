"""Generation for one request: from a checked request to the deltas of its choices."""
