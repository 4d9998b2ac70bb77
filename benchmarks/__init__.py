"""Scripts that measure, and the tables that they write."""
