"""Documents and pairs of one request: from a checked request to vectors and scores."""
