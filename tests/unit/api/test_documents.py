"""Answers that hold messages have the form that their models describe in OpenAPI."""

import msgspec
import pytest

from delayserver.api import documents, hot, models


@pytest.mark.parametrize(
    ("document", "model"),
    [
        (hot.PublishedDocument, models.PublishedModel),
        (documents.DeliveryDocument, models.DeliveryModel),
        (documents.MessageDocument, models.MessageModel),
        (documents.PulledDocument, models.PulledModel),
        (documents.PulledListDocument, models.PulledListModel),
        (documents.StateDocument, models.StateModel),
        (documents.CancelResultDocument, models.CancelResultModel),
        (documents.CancelledDocument, models.CancelledModel),
        (documents.DeadLetterDocument, models.DeadLetterModel),
        (documents.DeadLettersDocument, models.DeadLettersModel),
    ],
)
def test_fields_and_which_of_them_may_be_missing(document, model):
    described = {name: one.is_required() for name, one in model.model_fields.items()}
    written = {field.name: field.required for field in msgspec.structs.fields(document)}
    assert list(written.items()) == list(described.items())
