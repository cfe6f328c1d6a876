"""The card states each figure it was given."""

import pytest

from sluice_server.demo import card, recipe

TARGET = card.ModelFigures(4_000_000, 1.25, 0.91, 7_600_000, 3000.0)
DRAFT = card.ModelFigures(700_000, 1.75, 0.82, 2_500_000, 600.0)
FIGURES = card.Figures(
    "two cores", "3.11.7", 500, 9_000_000, 2_500_000, 60, 800_000, 240_000, 2.5, 1.5, 0.6, TARGET, DRAFT
)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            recipe.TARGET_RECIPE,
            ["4,000,000 parameters", "-50.0%", "-16.7%", "91%", "50 minutes on\ntwo cores", "3.0 pas"],
        ),
        (recipe.DRAFT_RECIPE, ["700,000 parameters", "-30.0%", "+16.7%", "82%", "10 minutes on\ntwo cores", "1.0 pas"]),
    ],
)
def test_the_figures_are_all_there(plan: recipe.Recipe, said: list[str]) -> None:
    text = card.render(plan, FIGURES)
    shared = ["2.500", "1.500", "1.750", "1.250", "60.0%", "3.11.7", "240,000 tokens", "license: apache-2.0", plan.name]
    assert [word for word in (*said, *shared) if word not in text] == []
