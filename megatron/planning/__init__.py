"""Planning of a run before it starts: memory, time and layout from shapes, schedules and a cluster's data sheet."""
