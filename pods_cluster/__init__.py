"""PODS cluster: reinforcement learning of language models with separately scaled generator and learner pools."""

__version__ = "0.1.0"
