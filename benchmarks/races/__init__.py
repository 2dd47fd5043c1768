"""Races of schedules: on the planner's timetable, and of the engine itself on emulated lanes."""
