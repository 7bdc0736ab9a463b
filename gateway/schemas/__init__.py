"""Requests of the API: strict models of supported fields, and a list of known fields without support."""
