"""Object storage: buckets and shared directories."""
