"""More than one engine behind one URL: replicas on Ray Serve, and a router that knows what each of them has cached."""
