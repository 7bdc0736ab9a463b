"""Conversion of tokens to the bytes of an answer: stop strings, log probabilities, chunks, whole objects."""
