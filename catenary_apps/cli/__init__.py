"""The `catenary` command. Its parts are loaded when they are called."""
