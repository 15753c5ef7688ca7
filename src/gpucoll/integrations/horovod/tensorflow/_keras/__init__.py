"""What `horovod.keras` and `horovod.tensorflow.keras` share, for Keras 2 and Keras 3."""
