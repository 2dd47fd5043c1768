"""How well a step's work overlaps on emulated machines, beside rivals' schedules."""
