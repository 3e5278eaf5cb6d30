"""Reports about runs from their folders: curves, timetables, settings and their differences."""
