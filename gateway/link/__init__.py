"""The gateway's streams to the routers, and what runs on them."""
