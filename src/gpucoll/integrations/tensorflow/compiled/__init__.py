"""The compiled part: what TensorFlow and XLA call."""
