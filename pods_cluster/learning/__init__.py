"""The learner: from kept rollouts to new weights by advantage, plan, loss (pure), and the DeepSpeed ranks that run them."""
