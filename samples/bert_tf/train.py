"""Pre-train BERT with a TensorFlow session: masked words and the next sentence, on made-up text."""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

SIZES = {  # layers, width, heads, vocabulary
    "tiny": (2, 32, 2, 100),
    "small": (4, 128, 4, 100),
    "base": (12, 768, 12, 30522),
}
MASK, FIRST_WORD = 1, 2


def initializer():
    return tf.truncated_normal_initializer(stddev=0.02)


def dense(x, width, name, activation=None):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape[-1], width], initializer=initializer())
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
        x = tf.nn.bias_add(tf.tensordot(x, kernel, 1), bias)
        return x if activation is None else activation(x)


def layer_norm(x, name="LayerNorm"):
    with tf.variable_scope(name):
        gamma = tf.get_variable("gamma", [x.shape[-1]], initializer=tf.ones_initializer())
        beta = tf.get_variable("beta", [x.shape[-1]], initializer=tf.zeros_initializer())
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)


def gelu(x):
    return 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0).astype("float32")))


def attention(x, mask, heads, dropout):
    _, length, width = x.shape.as_list()
    size = width // heads

    def split(y):
        return tf.transpose(tf.reshape(y, [-1, length, heads, size]), [0, 2, 1, 3])

    query, key, value = (split(dense(x, width, name)) for name in ("query", "key", "value"))
    scores = tf.matmul(query, key, transpose_b=True) / size**0.5 + mask
    shares = tf.nn.dropout(tf.nn.softmax(scores), rate=dropout)
    mixed = tf.transpose(tf.matmul(shares, value), [0, 2, 1, 3])
    return tf.reshape(mixed, [-1, length, width])


def encoder(ids, kinds, size, dropout):
    """The hidden states of all words, and the table of word embeddings."""
    layers, width, heads, vocabulary = SIZES[size]
    length = ids.shape[1]
    with tf.variable_scope("embeddings"):
        table = tf.get_variable("word_embeddings", [vocabulary, width], initializer=initializer())
        types = tf.get_variable("token_type_embeddings", [2, width], initializer=initializer())
        places = tf.get_variable("position_embeddings", [length, width], initializer=initializer())
        x = tf.nn.embedding_lookup(table, ids) + tf.nn.embedding_lookup(types, kinds) + places
        x = tf.nn.dropout(layer_norm(x), rate=dropout)
    mask = (1.0 - tf.cast(tf.not_equal(ids, 0), tf.float32)[:, None, None, :]) * -10000.0
    for at in range(layers):
        with tf.variable_scope(f"layer_{at}"):
            mixed = dense(attention(x, mask, heads, dropout), width, "output")
            x = layer_norm(x + tf.nn.dropout(mixed, rate=dropout), "LayerNorm_1")
            hidden = dense(dense(x, 4 * width, "intermediate", gelu), width, "out")
            x = layer_norm(x + tf.nn.dropout(hidden, rate=dropout), "LayerNorm_2")
    return x, table


def pretraining_loss(x, table, words, weights, is_next):
    """The mean loss of the masked words, plus that of the next sentence."""
    with tf.variable_scope("cls"):
        hidden = layer_norm(dense(x, x.shape[-1], "transform", gelu))
        bias = tf.get_variable("output_bias", [table.shape[0]], initializer=tf.zeros_initializer())
        logits = tf.tensordot(hidden, tf.transpose(table), 1) + bias
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=words, logits=logits)
        masked = tf.reduce_sum(weights * each) / (tf.reduce_sum(weights) + 1e-5)
        pooled = dense(x[:, 0], x.shape[-1], "pooler", tf.tanh)
        next_logits = dense(pooled, 2, "seq_relationship")
        following = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=is_next, logits=next_logits)
    return masked + tf.reduce_mean(following)


class AdamWeightDecay(tf.train.Optimizer):
    """Adam without bias correction, with decoupled weight decay, as BERT was trained."""

    def __init__(self, rate, decay=0.01):
        super().__init__(False, "AdamWeightDecay")
        self.rate, self.decay = rate, decay

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        updates = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            slots = [
                tf.get_variable(
                    f"{variable.op.name}/{slot}", variable.shape, trainable=False, initializer=tf.zeros_initializer()
                )
                for slot in ("adam_m", "adam_v")
            ]
            gradient = tf.convert_to_tensor(gradient)  # that of a table of embeddings is sparse
            m = 0.9 * slots[0] + 0.1 * gradient
            v = 0.999 * slots[1] + 0.001 * tf.square(gradient)
            step = m / (tf.sqrt(v) + 1e-6)
            if "LayerNorm" not in variable.name and "bias" not in variable.name:
                step += self.decay * variable
            updates += [variable.assign_sub(self.rate * step), slots[0].assign(m), slots[1].assign(v)]
        with tf.control_dependencies(updates):  # which read the step, for the rate
            return global_step.assign_add(1, name=name).op


def make_batch(source, count, length, vocabulary):
    """Pairs of sentences that count on: the second goes on where the first ends, or somewhere else."""
    half = length // 2
    start = source.randint(0, vocabulary, count)
    is_next = source.randint(0, 2, count)
    other = np.where(is_next == 1, start + half, source.randint(0, vocabulary, count))
    words = np.concatenate([start[:, None] + np.arange(half), other[:, None] + np.arange(length - half)], 1)
    words = FIRST_WORD + words % (vocabulary - FIRST_WORD)
    lengths = source.randint(length // 2, length + 1, count)
    present = np.arange(length) < lengths[:, None]
    masked = (source.rand(count, length) < 0.15) & present
    ids = np.where(masked, MASK, words) * present
    kinds = np.broadcast_to(np.arange(length) >= half, ids.shape)
    return ids, kinds.astype("int32"), words, masked.astype("float32"), is_next


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--save", help="write checkpoints with this prefix")
    return parser.parse_args()


def main():
    args = parse_arguments()
    tf.disable_eager_execution()
    tf.set_random_seed(1)

    shape = [None, args.length]
    ids, kinds, words = (tf.placeholder(tf.int32, shape, name) for name in ("ids", "kinds", "words"))
    weights, is_next = tf.placeholder(tf.float32, shape, "weights"), tf.placeholder(tf.int32, [None], "is_next")
    with tf.variable_scope("bert"):
        hidden, table = encoder(ids, kinds, args.size, args.dropout)
    loss = pretraining_loss(hidden, table, words, weights, is_next)

    step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(args.lr, step, args.steps, end_learning_rate=0.0)
    rate = tf.minimum(rate, args.lr * tf.cast(step + 1, tf.float32) / (0.1 * args.steps))
    variables = tf.trainable_variables()
    gradients, norm = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
    train = AdamWeightDecay(rate).apply_gradients(zip(gradients, variables), global_step=step)
    saver = tf.train.Saver()

    source = np.random.RandomState(0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for at in range(args.steps):
            batch = make_batch(source, args.batch_size, args.length, SIZES[args.size][3])
            feed = dict(zip((ids, kinds, words, weights, is_next), batch))
            value, length, _ = session.run([loss, norm, train], feed)
            print(f"step {at:>3}  loss {value:.5f}  norm {length:.3f}")
        if args.save:
            print("saved", saver.save(session, args.save, global_step=step))


if __name__ == "__main__":
    main()
