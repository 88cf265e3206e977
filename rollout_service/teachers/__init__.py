"""Teachers: vLLM servers that say how likely they find what the policy sampled. Nothing outside speaks to them."""

from rollout_service.teachers.scorer import TeacherScorer
from rollout_service.teachers.spec import TeacherSpec

__all__ = ["TeacherScorer", "TeacherSpec"]
