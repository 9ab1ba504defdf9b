"""What a plan runs on: devices, links, clusters, and the profiles they are read from."""
