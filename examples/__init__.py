"""Projects that use Regimen from outside; a `_target_` names them from the clone's root."""
