"""gittins: the policy, and one module each for learned values, groups, and lost parents."""

from kvcache.policies.gittins.policy import GittinsCachePolicy

__all__ = ["GittinsCachePolicy"]
