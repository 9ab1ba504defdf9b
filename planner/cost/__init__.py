"""Seconds and bytes: ops, collectives, memory, pipelines, whole steps."""
