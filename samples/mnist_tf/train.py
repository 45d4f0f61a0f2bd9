"""Train a small convolutional network with a TensorFlow session, on drawn digits with noise."""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

SIZE = 12
SEGMENTS = {  # of a seven-segment display, by digit: top, upper left and right, middle, lower left and right, bottom
    0: "1110111", 1: "0010010", 2: "1011101", 3: "1011011", 4: "0111010",
    5: "1101011", 6: "1101111", 7: "1010010", 8: "1111111", 9: "1111011",
}  # fmt: skip


def draw(digit):
    image = np.zeros((SIZE, SIZE), "float32")
    top, upper_left, upper_right, middle, lower_left, lower_right, bottom = (one == "1" for one in SEGMENTS[digit])
    for is_on, rows, columns in (
        (top, slice(1, 2), slice(3, 9)),
        (middle, slice(5, 6), slice(3, 9)),
        (bottom, slice(10, 11), slice(3, 9)),
        (upper_left, slice(1, 6), slice(3, 4)),
        (upper_right, slice(1, 6), slice(8, 9)),
        (lower_left, slice(5, 11), slice(3, 4)),
        (lower_right, slice(5, 11), slice(8, 9)),
    ):
        if is_on:
            image[rows, columns] = 1.0
    return image


def make_data(count, seed):
    """Digits at random places, with noise."""
    source = np.random.RandomState(seed)
    labels = source.randint(0, 10, count)
    shifts = source.randint(-2, 3, (count, 2))
    images = np.stack([np.roll(draw(label), shift, (0, 1)) for label, shift in zip(labels, shifts)])
    return (images + 0.4 * source.randn(*images.shape)).astype("float32")[..., None], labels


def convolution(x, width, name):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [3, 3, x.shape[-1], width])
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=1, padding="SAME") + bias)
        return tf.nn.max_pool2d(x, 2, 2, padding="SAME")


def dense(x, width, name):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape[-1], width])
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
        return tf.matmul(x, kernel) + bias


def model(images, labels, width):
    """The logits and the loss."""
    x = convolution(images, width, "conv1")
    x = convolution(x, 2 * width, "conv2")
    x = tf.reshape(x, [-1, 2 * width * (SIZE // 4) ** 2])
    x = tf.nn.relu(dense(x, 4 * width, "fc1"))
    logits = dense(x, 10, "fc2")
    return logits, tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines of progress")
    return parser.parse_args()


def main():
    args = parse_arguments()
    tf.disable_eager_execution()
    tf.set_random_seed(1)

    images = tf.placeholder(tf.float32, [None, SIZE, SIZE, 1])
    labels = tf.placeholder(tf.int64, [None])
    logits, loss = model(images, labels, args.width)
    correct = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, -1), labels), tf.float32))
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(args.lr, step, 100, 0.7)
    train = tf.train.AdamOptimizer(rate).minimize(loss, global_step=step)

    train_images, train_labels = make_data(4096, seed=0)
    test_images, test_labels = make_data(512, seed=1)
    order = np.random.RandomState(2)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for at in range(args.steps):
            chosen = order.randint(0, len(train_labels), args.batch_size)
            feed = {images: train_images[chosen], labels: train_labels[chosen]}
            value, _ = session.run([loss, train], feed)
            if at % args.log_interval == 0:
                print(f"step {at:>4}  loss {value:.4f}")
        feed = {images: test_images, labels: test_labels}
        value, share = session.run([loss, correct], feed)
        print(f"test  loss {value:.4f}  accuracy {100 * share:.1f} %")


if __name__ == "__main__":
    main()
