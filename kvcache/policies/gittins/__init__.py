"""gittins: the policy, and what it learns, groups and remembers, a module each."""

from kvcache.policies.gittins.policy import GittinsCachePolicy

__all__ = ["GittinsCachePolicy"]
