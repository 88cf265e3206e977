"""The README's picture of a group's life is the table's."""

from pathlib import Path

from rollout_service.core.diagram import mermaid


def test_the_readme_shows_the_transition_table_as_it_is():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"```mermaid\n{mermaid()}\n```" in readme, (
        "python -c 'from rollout_service.core.diagram import mermaid; ...'"
    )
