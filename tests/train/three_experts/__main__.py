"""The fork server of `tests.train.runs` with the family in the table. The record is all that the product is told."""

from __future__ import annotations

from supertuner.config import families

families.FAMILIES["three-stages"] = families.FamilyRecord(  # type: ignore[index]  # a plain dict
    package="tests.train.three_experts",
    pipelines=("ThreeStagePipeline",),
    experts={"early": "transformer", "middle": "transformer_2", "late": "transformer_3"},
)

if __name__ == "__main__":
    from tests.train.runs import serve

    serve()
