"""Rollouts of several turns: environments that answer the model, the processes they run in, and turns as tokens.

What is imported from here is for code of users, and imports neither torch nor ray.
"""

from pods_cluster.environments.environment import Environment, Message
from pods_cluster.environments.tool_environment import ToolEnvironment

__all__ = ["Environment", "Message", "ToolEnvironment"]
