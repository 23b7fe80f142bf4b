"""What is to be run, and the script that runs it on the machine."""

import os
import re
import shlex

# Of the caller's environment, what makes no sense on another machine.
LEFT_BEHIND = {"OLDPWD", "PWD", "SHLVL", "_", "SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY",
               "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY", "LINES", "COLUMNS"}
TOOLS = "/run/soft-roce/bin"


class Job:
    """One command with its surroundings."""

    def __init__(self, command, name="soft-roce", hcas=1, out=None, environment=(), clean=False,
                 stdin=False, terminal=None, peer=None, address="10.0.0.1", address6="fd00::1", peer6=None):
        self.command = command
        self.name = name
        self.hcas = hcas
        self.out = os.path.realpath(out) if out else None
        self.extra = list(environment)
        self.clean = clean
        self.stdin = stdin
        self.terminal = terminal  # (rows, columns) of the caller's terminal, or None
        self.peer = peer  # (name, address, address6)
        self.address = address
        self.address6 = address6
        self.rxe = "rxe0"
        self.native = False

    def environment(self):
        if self.clean:
            variables = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TERM") if key in os.environ}
        else:
            variables = {key: value for key, value in os.environ.items() if key not in LEFT_BEHIND}
        variables.setdefault("HOME", "/root")
        variables.setdefault("TERM", "dumb")
        path = variables.get("PATH", "")
        # The tools for devices and networks are in sbin, which a user's PATH may lack.
        variables["PATH"] = ":".join(filter(None, [TOOLS, path, "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"]))
        variables.update({
            "SOFT_ROCE": self.name,
            "SOFT_ROCE_ADDR": self.address,
            "SOFT_ROCE_ADDR6": self.address6,
            "SOFT_ROCE_NETDEV": "d0",
            "SOFT_ROCE_DEVICE": self.rxe if self.hcas else "",
            "SOFT_ROCE_HCAS": str(self.hcas),
        })
        if self.native:
            variables["SOFT_ROCE_NATIVE"] = "1"
        if self.hcas == 2:
            variables.update({"SOFT_ROCE_ADDR_2": "10.0.0.2", "SOFT_ROCE_ADDR6_2": "fd00::2",
                              "SOFT_ROCE_NETDEV_2": "d1", "SOFT_ROCE_DEVICE_2": "rxe1"})
        if self.peer:
            variables.update({"SOFT_ROCE_PEER": self.peer[1], "SOFT_ROCE_PEER6": self.peer[2]})
        if self.out:
            variables["OUT"] = self.out
        for item in self.extra:
            name, _, value = item.partition("=")
            variables[name] = value
        return variables

    def script(self):
        """A script for /bin/sh that becomes the command."""
        lines = ["ulimit -l unlimited 2>/dev/null"]
        for name, value in sorted(self.environment().items()):
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                lines.append(f"export {name}={shlex.quote(value)}")
        directory = shlex.quote(os.getcwd())
        lines.append(f"cd {directory} || {{ echo soft-roce: no directory {directory} on the machine >&2; exit 125; }}")
        lines.append("exec " + " ".join(shlex.quote(word) for word in self.command))
        return "\n".join(lines) + "\n"

    def settings(self, merge):
        """The variables that guest/init and guest/network.sh read."""
        rows, columns = self.terminal or (0, 0)
        hosts = [f"{self.address} {self.name}", f"{self.address6} {self.name}"]
        if self.peer:
            hosts += [f"{self.peer[1]} {self.peer[0]}", f"{self.peer[2]} {self.peer[0]}"]
        values = {
            "NAME": self.name, "HCAS": self.hcas, "WIRE": "yes" if self.peer else "no", "ADDR": self.address,
            "ADDR6": self.address6, "RXE": self.rxe, "HOSTS": "\n".join(hosts), "OUT": self.out or "",
            "STDIN": "yes" if self.stdin else "no", "MERGE": "yes" if merge else "no",
            "TERMINAL": "yes" if self.terminal else "no", "ROWS": rows, "COLUMNS": columns,
        }
        return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())

    def text(self, merge):
        return (self.settings(merge) + "### command\n" + self.script()).encode("utf-8", "surrogateescape")
