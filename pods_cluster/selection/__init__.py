"""Which m of a group's n rollouts are trained on: rules and settling (pure), assembly of groups, the selector actor."""
