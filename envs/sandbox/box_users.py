"""The users of a box, as its image names them: two for each slot, one for runs and one for the session."""

SLOTS = 512
FIRST_UID, GID = 20_000, 20_000
GROUP, WORKSPACE, SHELL = "box", "/workspace", "/bin/bash"
_NOBODY, _NOWHERE = 65_534, "/usr/sbin/nologin"


def run_uid(slot: int) -> int:
    """The uid of a slot's runs; that of its session is the next."""
    return FIRST_UID + 2 * slot


def account_files() -> dict[str, bytes]:
    """The files in /etc that tell of users, groups and where names are looked up, by path."""
    users = ["root:x:0:0:root:/:/bin/bash"]
    for slot in range(SLOTS):
        for uid, kind in ((run_uid(slot), "run"), (run_uid(slot) + 1, "session")):
            users.append(f"{kind}{slot}:x:{uid}:{GID}::{WORKSPACE}:{SHELL}")
    users.append(f"nobody:x:{_NOBODY}:{_NOBODY}::/nonexistent:{_NOWHERE}")
    groups = ["root:x:0:", f"{GROUP}:x:{GID}:", f"nogroup:x:{_NOBODY}:"]
    lookups = ["passwd: files", "group: files", "hosts: files dns"]
    return {
        "/etc/passwd": _lines(users),
        "/etc/group": _lines(groups),
        "/etc/nsswitch.conf": _lines(lookups),
    }


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
