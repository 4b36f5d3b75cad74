"""From kept rollouts to new weights: advantage, plan, loss (pure), and the DeepSpeed ranks that run them."""
