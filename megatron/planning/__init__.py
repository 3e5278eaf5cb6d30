"""What a run will need and how long it will take, before it is paid for: memory, time and layout from shapes, schedules and a cluster's data sheet."""
