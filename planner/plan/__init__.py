"""The plan as pure data, and its JSON form."""
