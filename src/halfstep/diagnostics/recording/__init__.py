"""What a run writes down of its steps: lines of numbers, and the batches of spikes."""
