"""What a run is told as: tables, JSON, HTML; sees a plan, never the search."""
