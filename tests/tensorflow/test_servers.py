"""Servers: operations run in them, they are off the network, and their end is reported at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, socket, threading, time
from gemini import GeminiConfig
from gemini.errors import WorkerError
from gemini.tensorflow.server_process import listening_sockets
from gemini.tensorflow.servers import servers_for

servers = servers_for(GeminiConfig(mode="pipeline", pipeline_degree=2))
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [None, 2])
with tf.device(servers.devices.names[1][0]):
    y = x @ tf.ones([2, 2])
    endless = tf.while_loop(lambda at, z: at < 10**9, lambda at, z: (at + 1, tf.tanh(z @ x)), [0, y])[1]

child = servers._processes[0].process
port = int(servers.target.rpartition(":")[2])
interfaces = {one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for one in listening_sockets(port)}
print(interfaces)
killed = []

def kill():
    time.sleep(0.5)
    killed.append(time.monotonic())
    child.kill()

feed = {x: [[1, 2], [3, 4]]}
try:
    with tf.Session(servers.target) as session:
        servers.check_devices(session)
        options, ran = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), tf.RunMetadata()
        print(session.run(y, feed, options, ran).tolist())
        ran_on = [(node.node_name, one.device) for one in ran.step_stats.dev_stats for node in one.node_stats]
        print({device for name, device in ran_on if "matmul" in name.lower()})
        threading.Thread(target=kill).start()
        with servers.explained():
            session.run(endless, feed)
except WorkerError as error:
    print(str(error).replace(str(child.pid), "PID"))
    print(time.monotonic() - killed[0] < 2)
try:
    servers.target
except WorkerError as error:
    print("again:", "SIGKILL" in str(error))
"""


def test_a_graph_runs_in_a_server_and_its_death_is_named_within_two_seconds() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == [
        "{b'lo\\x00'}",
        "[[3.0, 3.0], [7.0, 7.0]]",
        "{'/job:worker/replica:0/task:1/device:CPU:0'}",
        "server 1 (process PID) was ended by SIGKILL",
        "    → its variables are lost: start the script again from its last checkpoint",
        "True",
        "again: True",
    ], done.stderr
    assert done.returncode == 0
