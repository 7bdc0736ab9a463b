"""`catenary up`: the supervisor of a deployment on one machine."""
