"""What Horovod's names stand on, for any framework: collectives keyed by name, process sets, join, the timeline.

`engine` runs operations on the framework-free runtime; `collectives` says what each is made of; a framework's module
(herring.horovod.torch) turns its tensors into what these take.
"""
