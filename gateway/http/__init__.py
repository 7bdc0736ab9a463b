"""HTTP below the routes: the server, its limits, bodies, disconnects."""
