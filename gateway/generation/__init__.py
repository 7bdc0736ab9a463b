"""One request's sequences: from a checked request to the deltas of its choices."""
