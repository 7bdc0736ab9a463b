"""The requests of the API: strict models of what is supported, and a list of what is known and is not."""
