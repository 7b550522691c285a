"""The lost-update meter: which updates leave the stored weights unchanged."""
