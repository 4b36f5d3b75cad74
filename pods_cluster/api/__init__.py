"""Python's door to a run: a model, rows and reward functions → a run and its result."""
