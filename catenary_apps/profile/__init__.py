"""`catenary profile`: where the time of a running engine's steps goes."""
