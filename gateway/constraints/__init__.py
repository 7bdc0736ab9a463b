"""Constraints of an answer: from the parameters of a request to what an engine gets."""
