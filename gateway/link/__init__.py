"""Streams to the routers, and the sequences on them."""
