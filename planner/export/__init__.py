"""Plans as the configuration files of other frameworks."""
