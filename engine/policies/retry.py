"""Retry: whether a group whose attempt failed gets another one."""

from engine.policies.registry import register
from engine.states.view import GroupView, View


@register("retry", "budgets")
class Budgets:
    """One budget per cause: few attempts for a bad prompt, more for a bad machine."""

    def retry(self, view: View, group: GroupView, cause: str) -> bool:
        if cause == "data":
            return group.data_failures < view.limits.data_attempts
        return group.infrastructure_failures < view.limits.infrastructure_attempts
