"""Options of `vllm serve` and letters of its Gaudi start scripts as options of `catenary up`. Pure."""
