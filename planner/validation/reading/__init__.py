"""From a CSV file to checked runs."""
