"""Who may call, which addresses may be called, and how a webhook is signed."""
