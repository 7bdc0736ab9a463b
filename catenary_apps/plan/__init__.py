"""`catenary plan`: what an engine would do with a model on a card, without having either."""
