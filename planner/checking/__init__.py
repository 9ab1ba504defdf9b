"""What a plan's script does on each rank, found out without the cluster."""
