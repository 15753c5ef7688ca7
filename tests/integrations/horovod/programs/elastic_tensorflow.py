"""Elastic training with TensorFlow: rank 1 of 3 is killed, and the others go on from the commit."""

import os
import signal

import horovod.tensorflow as hvd
import tensorflow as tf

STEPS = 30
hvd.init()
v = tf.Variable([0.0])


@tf.function
def train_step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(-v)
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [v])
    v.assign_sub(gradient)


@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        if hvd.rank() == 1 and hvd.size() == 3 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step()
        state.step += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.commit()


state = hvd.elastic.TensorFlowState([v], step=0, sizes=[])
train(state)
assert v.numpy().tolist() == [STEPS]
print("trained by", state.sizes, flush=True)
