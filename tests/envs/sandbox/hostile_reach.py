"""Hostile cases: reaching out of the box - network, kernel, secrets, other boxes, whoever comes next."""

from .hostile_cases import Hostile, Scene

_TRY = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, work):
    try: answer = work()
    except (OSError, ValueError) as error: print("refused", what, error)
    else: print("REACHED", what, answer)
def check(answer):
    if answer < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
def system(number, *arguments):
    # Only what is refused as such counts: whatever complains of arguments has been let through.
    answer = libc.syscall(number, *arguments)
    if answer < 0 and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        return "let through", os.strerror(ctypes.get_errno())
    return check(answer)
"""
_CONNECT = (
    _TRY
    + """
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as line:
        line.settimeout(0.2)
        line.connect(address)
        if kind == socket.SOCK_DGRAM: line.send(b"hostile")
        return address
"""
)


def _connect(name: str, attacks: str, lines: str, gap: str = "") -> Hostile:
    return Hostile(name, attacks, _CONNECT + lines, local_gap=gap)


def _neighbour_listens(scene: Scene) -> None:
    code = "import socket, threading\ndoor = socket.create_server(('127.0.0.1', 5555))\n"
    code += "named = socket.socket(socket.AF_UNIX)\nnamed.bind('\\0toolgym-neighbour')\nnamed.listen()"
    assert scene.neighbour.exec(code).ok
    try:
        scene.judge(
            scene.run(
                _CONNECT
                + "attempt('tcp', lambda: connect(socket.AF_INET, ('127.0.0.1', 5555)))\n"
                + "attempt('unix', lambda: connect(socket.AF_UNIX, '\\0toolgym-neighbour'))"
            )
        )
    finally:
        assert scene.neighbour.exec("door.close(); named.close()").ok


def _neighbour_has_files(scene: Scene) -> None:
    code = "import os\nprint(os.getpid(), os.getuid())\nfor folder in ('.', '/tmp', '/dev/shm'):\n"
    code += "    open(f'{folder}/of-the-neighbour', 'w').write('x')"
    assert scene.neighbour.exec(code).ok
    code = "import glob\nplaces = ('.', '/tmp', '/dev/shm', '/mnt/workspace', '/proc/*/root/tmp', '/proc/*/cwd')\n"
    code += "found = [path for place in places for path in glob.glob(place + '/of-the-neighbour')]\n"
    code += "print('REACHED' if found else 'stopped', found)"
    scene.judge(scene.run(code))
    assert scene.neighbour.exec("os.path.exists('of-the-neighbour')").text == "True"


NETWORK = (
    _connect(
        "TCP to the client's machine",
        "a server of this machine, by all its addresses",
        "for host in @HOSTS@: attempt(host, lambda: connect(socket.AF_INET, (host, @PORT@)))\n"
        "attempt('v6', lambda: connect(socket.AF_INET6, ('::1', @PORT@)))",
    ),
    _connect(
        "TCP to the internet",
        "a way out",
        "for host in ('1.1.1.1', '8.8.8.8'): attempt(host, lambda: connect(socket.AF_INET, (host, 443)))",
    ),
    Hostile(
        "UDP to the client's machine",
        "a server of this machine: what is sent must not arrive",
        _CONNECT + "for host in @HOSTS@:\n    try: connect(socket.AF_INET, (host, @PORT@), socket.SOCK_DGRAM)\n"
        "    except OSError as error: print(error)",
    ),
    _connect(
        "names",
        "a name server",
        "attempt('localhost', lambda: socket.getaddrinfo('example.com', 80))\n"
        "attempt('server', lambda: connect(socket.AF_INET, ('8.8.8.8', 53)))",
    ),
    _connect(
        "metadata of the cloud",
        "a machine's credentials",
        "for host in ('169.254.169.254', '169.254.170.2'): attempt(host, lambda: connect(socket.AF_INET, (host, 80)))",
    ),
    _connect(
        "Docker's socket",
        "the engine, and by it the machine",
        "for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock'):\n"
        "    attempt(path, lambda: connect(socket.AF_UNIX, path))",
    ),
    _connect(
        "abstract unix socket",
        "a server of this machine that has no file",
        "attempt('abstract', lambda: connect(socket.AF_UNIX, '\\0@ABSTRACT@'))",
    ),
    _connect(
        "unix socket in a folder",
        "a server of this machine, by its file outside of homes, /run and /tmp",
        "attempt('file', lambda: connect(socket.AF_UNIX, '@SOCKET@'))",
        gap="unix sockets outside of homes, /run and /tmp can be talked to",
    ),
    _connect(
        "raw and packet sockets",
        "the wire",
        "for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 768), (17, 2, 768), (2, 2, 1)):\n"
        "    attempt((family, kind, protocol), lambda: socket.socket(family, kind, protocol).bind(('127.0.0.1', 0)))",
    ),
    _connect(
        "other families of sockets",
        "parts of the kernel behind them: vsock, the kernel's cryptography, netlink, bluetooth, and all others",
        "for family in set(range(46)) - {1, 2, 10}:\n    for kind in (1, 2, 3, 5):\n"
        "        attempt(family, lambda: socket.socket(family, kind, 0))",
    ),
    Hostile("sockets of another box", "its neighbour's servers", _neighbour_listens),
    Hostile("files of another box", "its neighbour's folders", _neighbour_has_files),
)


def _calls(name: str, attacks: str, lines: str) -> Hostile:
    return Hostile(name, attacks, _TRY + lines)


KERNEL = (
    _calls(
        "unshare",
        "namespaces of its own, and the rights in them",
        "for flag in (0x10000000, 0x10020000, 0x40000000, 0x20000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):\n"
        "    attempt(hex(flag), lambda: check(libc.unshare(flag)))",
    ),
    _calls(
        "clone into new namespaces",
        "the same, by clone and clone3",
        "def forked(pid):\n    if check(pid) == 0: os._exit(0)\n    return pid\n"
        "for flag in (0x10000000, 0x10020000, 0x40000000):\n"
        "    attempt('clone', lambda: forked(libc.syscall(56, flag | 17, 0, 0, 0, 0)))\n"
        "    struct = (ctypes.c_uint64 * 8)(flag, 0, 0, 0, 17, 0, 0, 0)\n"
        "    attempt('clone3', lambda: forked(libc.syscall(435, struct, 64)))",
    ),
    _calls(
        "setns",
        "the worker's namespaces",
        "for kind in ('mnt', 'net', 'user', 'pid', 'ipc'):\n"
        "    attempt(kind, lambda: check(libc.setns(os.open(f'/proc/1/ns/{kind}', os.O_RDONLY), 0)))\n"
        "attempt('pidfd', lambda: check(libc.setns(os.pidfd_open(1), 0x20000)))",
    ),
    _calls(
        "mount and umount",
        "what hides and protects files",
        "for kind in (b'tmpfs', b'proc', b'sysfs', b'cgroup', b'overlay'):\n"
        "    attempt(kind, lambda: check(libc.mount(b'none', b'/tmp', kind, 0, None)))\n"
        "attempt('bind', lambda: check(libc.mount(b'/', b'/tmp', None, 4096, None)))\n"
        "attempt('remount', lambda: check(libc.mount(b'none', b'/', None, 32 | 4096, None)))\n"
        "for path in (b'/tmp', b'/home', b'/root', b'/proc', b'/run', b'/dev/shm', b'/'):\n"
        "    attempt(path, lambda: check(libc.umount2(path, 2)))\n"
        "for number in (428, 429, 430, 432, 442, 155): attempt(number, lambda: system(number, 0, 0, 0, 0, 0))",
    ),
    _calls("chroot", "another root", "attempt('chroot', lambda: os.chroot('/tmp'))"),
    _calls(
        "becoming root",
        "every right",
        "for name in ('setuid', 'setgid', 'seteuid', 'setegid'): attempt(name, lambda: getattr(os, name)(0))\n"
        "attempt('all', lambda: os.setresuid(0, 0, 0))\nattempt('groups', lambda: os.setgroups([0]))\n"
        "attempt('neighbours', lambda: os.setuid(os.getuid() + 1))\n"
        "lines = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)\n"
        "rights = {name: lines[name] for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb') if int(lines[name], 16)}\n"
        "print('REACHED' if rights or lines['NoNewPrivs'] != '1' or lines['Groups'].strip() else 'stopped', rights)",
    ),
    _calls(
        "io_uring",
        "a wide door into the kernel",
        "attempt('io_uring', lambda: system(425, 8, ctypes.create_string_buffer(120)))",
    ),
    _calls(
        "bpf",
        "a wide door into the kernel",
        "for command in range(8): attempt('bpf', lambda: system(321, command, ctypes.create_string_buffer(128), 128))",
    ),
    _calls(
        "perf events",
        "a wide door into the kernel",
        "event = ctypes.create_string_buffer(b'\\x01\\0\\0\\0\\x70', 128)\n"
        "attempt('perf', lambda: system(298, event, 0, -1, -1, 0))",
    ),
    _calls(
        "keyrings",
        "keys that outlive the box",
        "attempt('add', lambda: system(248, b'user', b'x', b'x', 1, -3))\n"
        "for command in (0, 1, 11): attempt('keyctl', lambda: system(250, command, -3, 0, 0))",
    ),
    _calls(
        "userfaultfd",
        "a help for attacks on the kernel",
        "for flag in (0, 1): attempt('fault', lambda: system(323, flag))",
    ),
    _calls(
        "System V IPC",
        "memory that outlives its processes and counts against nobody",
        "attempt('shm', lambda: system(29, 0, 1 << 20, 0o1600))\nattempt('sem', lambda: system(64, 0, 1, 0o1600))\n"
        "attempt('msg', lambda: system(68, 0, 0o1600))",
    ),
    _calls(
        "name and clock of the machine",
        "what all share",
        "attempt('name', lambda: check(libc.sethostname(b'mine', 4)))\n"
        "attempt('domain', lambda: check(libc.setdomainname(b'mine', 4)))\n"
        "attempt('clock', lambda: __import__('time').clock_settime(0, 1e9))\n"
        "attempt('reboot', lambda: system(169, 0xfee1dead, 672274793, 0x89abcdef, 0))\n"
        "attempt('log', lambda: system(103, 3, ctypes.create_string_buffer(64), 64))\n"
        "attempt('swap', lambda: system(168, b'/none'))",
    ),
    _calls(
        "/proc/sys and /sys",
        "the kernel's settings",
        "for path in ('kernel/core_pattern', 'kernel/hostname', 'net/ipv4/ip_forward', 'vm/overcommit_memory',\n"
        "             'kernel/pid_max', 'kernel/ns_last_pid', 'user/max_user_namespaces'):\n"
        "    attempt(path, lambda: os.open(f'/proc/sys/{path}', os.O_WRONLY))\n"
        "for path in ('/proc/sysrq-trigger', '/proc/1/oom_score_adj', '/sys/kernel/uevent_helper', '/proc/kcore',\n"
        "             '/proc/kmsg'):\n"
        "    attempt(path, lambda: os.open(path, os.O_RDWR))",
    ),
    _calls(
        "control groups",
        "the limits of the box, and by release_agent the machine",
        "for top, folders, files in os.walk('/sys/fs/cgroup'):\n    for name in files:\n"
        "        if name in ('cgroup.procs', 'tasks', 'release_agent', 'memory.limit_in_bytes', 'memory.max'):\n"
        "            try: os.close(os.open(f'{top}/{name}', os.O_WRONLY))\n            except OSError: continue\n"
        "            print('REACHED', top, name)\n"
        "    if top.count('/') > 6: folders.clear()\nattempt('new', lambda: os.mkdir('/sys/fs/cgroup/mine'))",
    ),
    _calls(
        "devices",
        "the disk and the memory of the machine",
        "import stat\n"
        "for name in ('mem', 'kmem', 'port', 'kmsg', 'sda', 'vda', 'nvme0n1', 'kvm', 'net/tun', 'loop0'):\n"
        "    attempt(name, lambda: os.open('/dev/' + name, os.O_RDONLY))\n"
        "for major, minor in ((1, 1), (8, 0), (254, 0)):\n"
        "    attempt('node', lambda: os.mknod('/tmp/node', stat.S_IFBLK | 0o666, os.makedev(major, minor)))",
    ),
    _calls(
        "kernel modules",
        "the kernel itself",
        "for number in (175, 313, 246, 320, 176, 304, 303, 300):\n"
        "    attempt(number, lambda: system(number, 0, 0, 0, 0, 0))",
    ),
    Hostile(
        "32-bit system calls",
        "the filter: other numbers",
        "import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\n"
        # push rbx; mov eax, 5 (unshare is 310 there): mov ebx, CLONE_NEWUSER; int 0x80; pop rbx; ret
        "page.write(bytes.fromhex('53' 'b836010000' 'bb00000010' 'cd80' '5b' 'c3'))\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "answer = call()\nprint('REACHED' if answer == 0 else 'refused', answer)",
        ends="ok killed timeout",
        timeout=0.5,
    ),
)

_SCAN = """
import re, sys
found, pattern = set(), re.compile(b"CANARY-[a-z]+-" + b"1234")
for line in open("/proc/self/maps"):
    field = line.split()
    if "r" not in field[1] or len(field) > 5 and field[5].startswith("[v"): continue
    start, end = (int(x, 16) for x in field[0].split("-"))
    try:
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(start); found |= set(pattern.findall(memory.read(end - start)))
    except OSError: pass
print("REACHED" if found else "stopped", sorted(found))
"""


def _earlier_text(scene: Scene) -> None:
    def canary(kind: str) -> str:
        return f"CANARY-{kind}-" + "1234"

    files = {"f": "y" * 100 + canary("file")}
    scene.box.run(f"x = {canary('run')!r}", stdin=canary("stdin"), files=files)
    scene.cell(f"x = {canary('cell')!r}")
    scene.play("shell", f"echo {canary('shell')}")
    scene.box.get("f")
    scene.run(f"x = {canary('large')!r}" + "#" * 300_000)
    scene.run(f"import numpy; x = {canary('numpy')!r}", timeout=10.0)
    scene.box.reset()
    for kind, code in (("run", _SCAN), ("cell", _SCAN), ("run", _SCAN + "#numpy")):
        scene.judge(scene.play(kind, code, timeout=5.0))


_LEAVE = """
import ctypes, os, signal
for folder in (".", "/tmp", "/dev/shm"): open(f"{folder}/left", "w").write("left")
ctypes.CDLL(None).mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None)
left = "left"
if os.fork() == 0:
    os.setsid()
    while True: signal.pause()
"""


def _leave_everything(scene: Scene) -> None:
    # Message queues are not to be had at all where there is no /dev/mqueue.
    queues = scene.run("import os\nprint(os.path.isdir('/dev/mqueue'))").text
    assert scene.cell(_LEAVE).ok
    code = "import ctypes, os\nprint(ctypes.CDLL(None).mq_open(b'/left', os.O_RDWR) >= 0)"
    scene.says("run", code, queues)


def _nothing_was_left(scene: Scene) -> None:
    code = "import ctypes, os\nfolders = ('.', '/tmp', '/dev/shm')\n"
    code += "print([n for f in folders for n in os.listdir(f) if os.lstat(f + '/' + n).st_uid])\n"
    scene.says("run", code + "print(ctypes.CDLL(None).mq_open(b'/left', os.O_RDWR))", "[]\n-1")
    code = "import os\npids = set(filter(str.isdigit, os.listdir('/proc'))) - {str(os.getpid())}\n"
    scene.says("run", code + "print([pid for pid in pids if os.stat('/proc/' + pid).st_uid])", "[]")
    assert "NameError" in scene.cell("left").text


SECRETS = (
    _calls("/etc/shadow", "the machine's passwords", "attempt('shadow', lambda: open('/etc/shadow').read())"),
    Hostile(
        "secret in the client's environment",
        "keys that the client holds",
        "import glob, os\nwanted = '-'.join(('@SECRET_HEAD@', '@SECRET_TAIL@'))\nfound = wanted in str(os.environ)\n"
        "for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "    try: found |= wanted in open(path, errors='replace').read()\n    except OSError: pass\n"
        "print('REACHED' if found else 'stopped')",
        says="stopped",
    ),
    Hostile(
        "file of the client's machine",
        "what everybody may read there",
        "try: print('REACHED', open('@CANARY@').read())\nexcept OSError as error: print(error)",
        local_gap="what everybody may read outside of homes, /run and /tmp can be read",
    ),
    Hostile(
        "file in a home",
        "keys and notes",
        "import glob, os\nfound = [p for f in ('/root', '/home/*', '/tmp', '/var/tmp', '/mnt', '/srv') "
        "for p in glob.glob(f + '/.*') + glob.glob(f + '/toolgym-*') + glob.glob(f + '/.ssh/*')]\n"
        "found = [p for p in found if os.path.isfile(p)]\nprint('REACHED' if found else 'stopped', found)",
        says="stopped",
    ),
    _calls(
        "writing files of the machine",
        "what everybody may write there, and what Python and the worker are made of",
        "import json, sys\n"
        "for path in ('@CANARY@', os.__file__, json.__file__, sys.executable, '/etc/passwd', '/opt/toolgym/child.py',\n"
        "             '/etc/new', '/new', '/usr/new', '/var/new', '@FOLDER@/new', '@INSIDE@/new.py'):\n"
        "    attempt(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT))",
    ),
    _calls(
        "processes of the machine",
        "what runs outside",
        "outside = [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 1]\nnames = []\n"
        "for pid in outside:\n    try: names.append(open(f'/proc/{pid}/cmdline').read())\n    except OSError: pass\n"
        "found = [name for name in names if 'dockerd' in name or 'pytest' in name]\n"
        "print('REACHED' if found else 'stopped', len(outside))\n"
        "attempt('client', lambda: os.kill(@CLIENT@, 0))\nprint('REACHED' if len(outside) > 10 else 'stopped')",
    ),
    Hostile("text of earlier programs", "another episode's code, input and files, in its own memory", _earlier_text),
    Hostile(
        "leftovers of an episode",
        "whoever comes next: files, queues, processes, variables",
        _leave_everything,
        after=_nothing_was_left,
    ),
)

REACH = (*NETWORK, *KERNEL, *SECRETS)
