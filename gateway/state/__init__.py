"""State that outlives a request: databases in a directory, and the jobs in them that gateways share."""
