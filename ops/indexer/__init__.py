"""The indexer half: keys -> pages -> logits -> regions."""
