"""HTTP routes, a file for each group of them."""
