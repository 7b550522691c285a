"""What can be trained: a language model from text, a classifier, a pretrained language model."""
