"""What keeps a run alive, and what ends it in time when it cannot continue."""
