"""Done inside a box: what programs ordinarily do. Prints "well"."""

import asyncio
import bz2
import decimal
import lzma
import multiprocessing
import os
import pwd
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
import zoneinfo
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory


def child(queue):
    queue.put(os.getpid())


def square(x):
    return x * x


def talk(family, address):
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(9)[::-1])

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.socket(family) as client:
            client.connect(server.getsockname())
            client.sendall(b"abc")
            assert client.recv(9) == b"cba"
        thread.join()


assert pwd.getpwuid(os.getuid()).pw_name == "run0"
assert os.path.realpath(sys.executable).startswith("/usr/")
with ThreadPoolExecutor(4) as threads:
    assert sum(threads.map(square, range(100))) == 328350
assert subprocess.run(["bash", "-c", "echo $((6*7)) | cat"], capture_output=True, check=True).stdout == b"42\n"
assert subprocess.run([sys.executable, "-I", "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
fork = multiprocessing.get_context("fork")
with fork.Pool(2) as pool:
    assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
queue = fork.Queue()
process = fork.Process(target=child, args=(queue,))
process.start()
assert queue.get(timeout=30) == process.pid
process.join()
memory = shared_memory.SharedMemory(create=True, size=100)
memory.close()
memory.unlink()
database = sqlite3.connect(os.path.join(tempfile.mkdtemp(), "x.db"))
database.execute("create table t (x)")
database.execute("insert into t values (1)")
database.commit()
assert database.execute("select * from t").fetchall() == [(1,)]
ssl.create_default_context()
assert decimal.Decimal("0.1") * 3 == decimal.Decimal("0.3")
talk(socket.AF_INET, ("127.0.0.1", 0))
talk(socket.AF_UNIX, os.path.join(tempfile.mkdtemp(), "s"))
for left, right in (socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
    left.send(b"x")
    assert right.recv(1) == b"x"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    datagrams.bind(("127.0.0.1", 0))


async def main():
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    return await asyncio.to_thread(square, 3)


assert asyncio.run(main()) == 9
os.close(os.pidfd_open(os.getpid()))
os.mkfifo("/tmp/fifo")
signal.setitimer(signal.ITIMER_REAL, 0)
assert zoneinfo.ZoneInfo("Europe/Paris").key
assert lzma.compress(bz2.compress(zlib.compress(b"x")))
assert uuid.uuid4()
assert time.tzname[0] == "UTC"
print("well")
