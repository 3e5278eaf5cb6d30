"""Memory of a run, estimated from shapes before any weight is allocated."""
