"""Limits per API key: requests and tokens in a minute, requests at a time; counted here or in Redis."""
