"""Selection of the m rollouts of a group that are trained on: rules, early stopping, assembly, the selector actor."""
