"""Loading the user's model and its data: the one place that runs user code outside of a trace."""
