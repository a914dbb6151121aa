"""Orders to a run that is going on: drain, stop, scale, set; and the question what it waits for."""
