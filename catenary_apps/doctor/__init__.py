"""`catenary doctor`: whether a host is set up for Gaudi, and what to do if it is not."""
