"""What a run left, as a page: its record, findings, figures and words; from files alone."""
