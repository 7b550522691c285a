"""Matrix products of linear layers below 16 bits."""
