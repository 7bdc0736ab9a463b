"""Files of requests, run in the background."""
