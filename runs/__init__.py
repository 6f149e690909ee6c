"""What a run is asked, refuses and records."""
