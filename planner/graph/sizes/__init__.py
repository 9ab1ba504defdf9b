"""The same step at other microbatch sizes and sequence lengths."""
