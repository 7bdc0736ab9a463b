"""What outlives a request: a directory, and databases in it that several gateways of one host may share."""
