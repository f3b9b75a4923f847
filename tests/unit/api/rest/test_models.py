"""The models of what the intake decodes have the fields of its structs."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.api import intake
from delayserver.api.rest import models


@pytest.mark.parametrize(
    ("struct", "model"),
    [
        (intake._PublishWithOptions, models.PublishModel),
        (intake._PublishUnderKey, models.PublishUnderKeyModel),
        (intake._Heartbeat, models.HeartbeatModel),
    ],
)
def test_fields_and_which_of_them_may_be_missing(
    struct: type[msgspec.Struct], model: type[models.Strict]
) -> None:
    described = {name: one.is_required() for name, one in model.model_fields.items()}
    decoded = {field.name: field.required for field in msgspec.structs.fields(struct)}
    assert decoded == described
