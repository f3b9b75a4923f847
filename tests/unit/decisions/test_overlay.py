"""An overlay: what undoing gives back."""

from __future__ import annotations

from delayserver.decisions.overlay import Overlay


def test_an_overlay_can_undo_in_reverse_order() -> None:
    overlay: Overlay[str, int] = Overlay()
    undo_first = overlay.put(1, "a", 10)
    undo_second = overlay.put(2, "a", 20)
    assert overlay.get("a") == 20
    undo_second()
    assert overlay.get("a") == 10
    undo_first()
    assert overlay.get("a") is None
    assert len(overlay) == 0
