"""Tried inside a box: a 32-bit system call of a 64-bit program. Prints whether that ended it."""

import ctypes
import mmap
import os

CODE = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret

child = os.fork()
if child == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(CODE)
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
print(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
