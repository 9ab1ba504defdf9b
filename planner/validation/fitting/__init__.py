"""The few constants of a framework on a cluster, fitted to runs."""
