"""Reports about runs from their folders: curves, timetables, samples, settings and their differences."""
