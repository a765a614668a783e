"""What herring.horovod.keras and herring.horovod.tensorflow.keras share: callbacks without their base class, models."""
