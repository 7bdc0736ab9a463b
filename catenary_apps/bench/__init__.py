"""`catenary bench`: load on a server, and batches in this process."""
