"""`catenary buckets`: the static shapes of an engine, compared across strategies."""
