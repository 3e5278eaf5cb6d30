"""What runs have left in their folders, as one page: curves, timetables, samples, settings and how they differ."""
